"""Tests of the contract of every method of kind `collaboration`, on models that compile in no time."""

import dataclasses
import inspect
import json
import pathlib

import jax
import numpy as np
import pytest
import texts as lib
from compiled import compiled_programs

from specjax import UsageError
from specjax.catalog import REQUIRED, of_kind
from specjax.collaborate import methods, results
from specjax.engine.prepare import Settings

ROWS = of_kind("collaboration")
GIVEN = {
    "draft": "draft", "segmenter": "segmenter", "punctuation": "segmenter", "judging": "judging", "digits": "judging",
    "positive": "cues", "negative": "cues", "verify": "cues", "check": "cues", "tuned": "tuned", "reward": "reward",
    "safe": "safe", "router": "router", "answer": "answers",
}  # fmt: skip
"""Parameters that are no options, and the word for them among `needs` and `takes`."""
OF_EVERY_METHOD = {
    "target", "risky", "prompts", "key", "max_new_tokens", "settings", "drafter", "temperature", "top_p",
}  # fmt: skip
NO_KEYS = {"arbitrage", "momentum", "spec_reason", "entropy_adaptive", "speculative_thinking"}  # greedy here


@pytest.mark.parametrize("name", ROWS)
def test_options_and_defaults_are_those_of_the_function(name):
    row, signature = ROWS[name], inspect.signature(ROWS[name].make).parameters
    default = lambda p: REQUIRED if p.default is p.empty else p.default
    declared = {option.name: option.default for option in row.options}
    assert declared == {option: default(signature[option]) for option in declared}
    undeclared = set(signature) - set(declared) - OF_EVERY_METHOD - ({"answer"} if name == "spec_reason" else set())
    assert undeclared <= set(GIVEN) and all(row.uses(GIVEN[other]) for other in undeclared)
    assert {GIVEN[other] for other in undeclared} == row.needs | row.takes
    assert row.guarantee == "lossy"


def test_every_file_is_in_the_table():
    files = {path.stem for path in pathlib.Path(methods.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(ROWS) == set(lib.calls())


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_independent_and_tokens_are_accounted_for(name):
    result = lib.run(name)
    order = [2, 0, 1]
    other = lib.run(name, prompts=[lib.PROMPTS[row] for row in order], key=lib.KEYS[np.array(order)])
    assert other.to_lists() == [result.to_lists()[row] for row in order]
    assert other.passes.tolist() == [result.passes[row].tolist() for row in order]
    lengths = np.asarray(result.lengths)
    authors, tokens = np.asarray(result.authors), np.asarray(result.tokens)
    written = np.arange(12) < lengths[:, None]
    assert ((authors >= 0) | (tokens == 8))[written].all() and (authors[~written] == -1).all()  # 8: put in by a method
    assert (authors.max(1) < result.passes.shape[1]).all() and result.finite.all()
    assert (np.asarray(result.passes).sum(1) >= lengths - (authors == -1).sum(1)).all()
    assert (result.passes <= result.read).all() and (
        result.stats.target_passes == result.passes[:, len(lib.calls()[name][1]) - 1]
    ).all()


WITHOUT_LOG = {"fs_gen", "momentum"}


@pytest.mark.parametrize("name", ROWS)
def test_every_log_has_a_summary_of_json(name):
    result = lib.run(name)
    rows = [result.summary(row) for row in range(3)]
    assert bool(rows[0]) == (name not in WITHOUT_LOG)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    sums = results.totals(rows)
    assert bool(sums) == bool(rows[0])
    for key, value in sums.items():
        numbers = [row[key] for row in rows if row[key] is not None]
        assert value == pytest.approx(sum(numbers) / (1 if isinstance(value, int) else len(numbers)))


@pytest.mark.parametrize("name", ROWS)
def test_options_are_checked_without_a_model(name):
    """The check takes every setting of `decode`, and returns the settings that the method uses."""
    check, parameters = ROWS[name].load_check(), inspect.signature(ROWS[name].make).parameters
    taken = inspect.signature(check).parameters
    checked = {o.name: o.default for o in ROWS[name].options if o.type not in ("yes_or_no", "writing_drafter")}
    scorers = {word: lib.calls()[name][2].get(word) for word in {"reward", "router"} & taken.keys()}
    free = {"temperature", "top_p", "tuned", "settings", *scorers}
    assert checked.keys() == taken.keys() - free and taken["settings"].kind is inspect.Parameter.VAR_KEYWORD
    settings = check(**checked, **scorers)
    assert isinstance(settings, Settings)
    for setting in {"temperature", "top_p"} & parameters.keys():
        assert getattr(settings, setting) == parameters[setting].default


@pytest.mark.parametrize("name", ROWS)
def test_a_second_call_compiles_nothing(name):
    lib.run(name)
    key = jax.random.split(jax.random.key(5), 3)
    lib.run(name, key=key)  # programs that only prepare arguments
    with compiled_programs() as compiled:
        other = lib.run(name, prompts=[[1], [2, 3], [4, 5, 6]], key=key)
    assert compiled == []
    same = lib.run(name, prompts=[[1], [2, 3], [4, 5, 6]], key=lib.KEYS)
    assert (other.to_lists() == same.to_lists()) == (name in NO_KEYS)


@pytest.mark.parametrize("name", ROWS)
def test_outputs_that_are_no_numbers_raise_an_error(name):
    function, models, settings = lib.calls()[name]
    no_numbers = lambda x: x * np.nan if np.issubdtype(x.dtype, np.floating) else x
    broken = [dataclasses.replace(model, params=jax.tree.map(no_numbers, model.params)) for model in models]
    with pytest.raises(UsageError, match="NaN"):
        function(*broken, lib.PROMPTS, key=lib.KEYS, max_new_tokens=12, **settings)


def test_a_row_without_outputs_fails_alone():
    result = lib.run("momentum")
    some = results.mark_failures(dataclasses.replace(result, finite=np.array([True, False, True])))
    assert some.failures == {1: results.NO_OUTPUT} and some.finish_reasons == ["length", "failed", "length"]
    assert some.to_lists() == [result.to_lists()[0], [], result.to_lists()[2]]


def test_models_of_other_vocabularies_are_refused():
    for name in ("spec_reason", "entropy_adaptive", "fs_gen", "speculative_thinking", "anchored", "foreal"):
        method, _, settings = lib.calls()[name]
        with pytest.raises(UsageError, match="vocabularies of 16, 8 tokens; models that write one text need the same"):
            method(lib.history(0), lib.history(1, vocab=8), [[1]], key=0, max_new_tokens=4, **settings)
