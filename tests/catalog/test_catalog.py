"""The table itself: it names everything, and says what the factories say."""

from __future__ import annotations

import inspect
import pathlib
import re
from typing import get_args

import pytest

import specjax
from specjax import METHODS, UsageError, decoders, drafters, verifiers
from specjax.catalog import PARAMETERS, REQUIRED, of_kind, parse_rule
from specjax.catalog.method import Kind
from specjax.catalog.options import numbers, read_call, yes_or_no
from specjax.diffusion import drafters as denoising
from specjax.types import Guarantee

PAGE = (pathlib.Path(__file__).parents[2] / "docs/methods.md").read_text()
IN_PYTHON = {
    "auto": {"dtype", "platform"},  # known from the target, and to the planner
    "choice": {"dtype", "platform", "bandit"},
    "nar_block": {"params"},
    "ppd": {"platform"},
}
"""Parameters that no option sets: what is not written in a word."""
GIVEN = {
    "costs": "costs", "index": "datastore", "corpus": "datastore", "source": "source", "fill": "fill", "draft": "draft",
    "head": "head", "longest": None,
    "denoiser": "denoiser", "middle": "draft", "target": None, "vocab_size": None,
}  # fmt: skip
"""What is given to a factory, and the word for it among `needs` and `takes`; None: it is the target's."""
PARTS = {"asking", "begun", "composed", "learned", "nodes", "reading", "settings", "widths"}
"""Files of drafters and loops that are parts of several, or of `auto`."""
OF_EVERY_LOOP = {
    "prompts", "key", "max_new_tokens", "top_k", "top_p", "eos", "capacity", "lengths", "condition", "tokens",
    "missing", "devices", "inputs",
}  # fmt: skip


def factory_of(row):
    if "denoiser" in row.needs:
        return getattr(denoising, row.name)
    return getattr(
        decoders if row.kind == "decoder" else drafters, row.make.__name__ if row.kind == "decoder" else row.name
    )


def signature_of(row) -> dict:
    """Name to default of what the factory takes, and the function of the table that calls it."""
    parameters = dict(inspect.signature(factory_of(row)).parameters)
    if row.kind == "drafter":
        parameters |= inspect.signature(row.make).parameters
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: REQUIRED if p.default is p.empty else p.default for name, p in parameters.items() if p.kind not in several
    }


@pytest.mark.parametrize(
    "name", [name for name in METHODS if METHODS[name].kind in ("drafter", "decoder")]
)  # the others: tests/diffusion/test_methods.py, tests/collaborate/test_methods.py
def test_options_and_defaults_are_those_of_the_factory(name):
    row, signature = METHODS[name], signature_of(METHODS[name])
    declared = {option.name: option.default for option in row.options}
    assert len(declared) == len(row.options)
    assert declared == {option: signature[option] for option in declared}
    others = set(signature) - set(declared) - {"target", "draft", "datastore"} - IN_PYTHON.get(name, set())
    if row.kind == "decoder":
        others -= OF_EVERY_LOOP | ({"temperature"} - set(declared)) | {"model"}
    assert others <= set(GIVEN) | {"inner", "retrieval", "fallback"}, others
    assert all(GIVEN[other] is None or row.uses(GIVEN[other]) for other in others)
    assert set(row.cpu_options) <= set(declared)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_rules_are_those_of_their_factories(name):
    make, options = PARAMETERS[name]
    assert make is getattr(verifiers, name)
    signature = inspect.signature(make).parameters
    assert [option.name for option in options] == list(signature)
    for option in options:
        assert option.default == (
            REQUIRED if signature[option.name].default is inspect.Parameter.empty else signature[option.name].default
        )


def test_every_file_of_a_method_is_in_the_table():
    files = lambda package: {path.stem for path in pathlib.Path(package.__file__).parent.rglob("*.py")} - {"__init__"}
    own = files(drafters) | files(denoising)
    assert (own - PARTS) | {"autoregressive"} == set(of_kind("drafter"))  # which is the engine's
    loops = {inspect.getmodule(row.make).__name__.rpartition(".")[2] for row in of_kind("decoder").values()}
    assert files(decoders) - PARTS == loops
    assert {name for kind in get_args(Kind) for name in of_kind(kind)} == set(METHODS)
    for name, row in METHODS.items():
        assert name == row.name and row.summary and all(option.help and option.form for option in row.options)
        assert row.guarantee in get_args(Guarantee)
        assert row.kind == "diffusion" or row.guarantee in ("distribution", "greedy", "lossy")


@pytest.mark.parametrize("name", METHODS)
def test_a_default_reads_as_it_is_written(name):
    for option in METHODS[name].options:
        if option.default in (None, REQUIRED):
            continue
        if isinstance(option.default, bool):
            assert option.type is yes_or_no and option.parse("yes" if option.default else "no") is option.default
        elif isinstance(option.default, tuple):
            assert option.type is numbers and option.parse(",".join(map(str, option.default))) == option.default
        elif option.name != "tree":
            read = option.parse(str(option.default))
            assert read == option.default and type(read) is type(option.default)


def test_the_page_of_methods_names_every_row_and_its_papers():
    table = PAGE[PAGE.index("| method") :].split("\n\n")[0].splitlines()
    for name, row in METHODS.items():
        lines = [line for line in table if f"`{name}`" in line]
        assert lines, name
        for number in re.findall(r"\d{4}\.\d{5}", row.paper):
            if not row.paper.startswith("our combination") and name != "choice":
                assert any(number in line for line in lines), (name, number)


def test_nobody_inspects_signatures():
    folder = pathlib.Path(specjax.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if "inspect.signature" in path.read_text()] == []


def test_calls_by_place_and_by_name():
    options = PARAMETERS["typical"][1]
    assert read_call("typical", options) == {}
    assert read_call("typical:0.2,0.4", options) == {"epsilon": 0.2, "delta": 0.4}
    assert read_call("typical:0.2,delta=0.4", options) == {"epsilon": 0.2, "delta": 0.4}
    for bad, words in (
        ("typical:0.2,0.4,1", "takes epsilon=X, delta=X, each once"),
        ("typical:0.2,epsilon=1", "each once"),
        ("typical:alpha=1", "takes epsilon=X"),
        ("typical:high", 'epsilon must be a number, not "high"'),
    ):
        with pytest.raises(UsageError, match=words):
            read_call(bad, options)


def test_rules_by_text():
    assert parse_rule("typical") is verifiers.VERIFIERS["typical"]
    assert parse_rule("multipath_block:3") is verifiers.multipath_block(paths=3)
    assert parse_rule("multipath_block:3").name == "multipath_block(3)"
    assert parse_rule("top_beta:1,tau=0") is verifiers.top_beta(beta=1, tau=0.0)
    for bad, words in (
        ("typicall", r'unknown rule "typicall"; choose one of greedy, .*, multipath_block:N'),
        ("standard:2", 'rule "standard" takes no parameters'),
        ("multipath_block:0", "multipath_block: paths must be at least 1"),
        ("typical:-1", "typical: epsilon must be at least 0"),
        ("top_beta:0", "beta must be at least 1"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_rule(bad)
