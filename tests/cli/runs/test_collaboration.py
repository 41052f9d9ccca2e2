"""`specjax generate` of texts that several models or samples write."""

import inspect
import json
import sys

import numpy as np
import pytest

import specjax
from specjax.bench import measure
from specjax.catalog import of_kind
from specjax.cli.options.groups import GenerateSampling
from specjax.cli.options.processing import ProcessingOptions
from specjax.cli.runs import collaboration
from specjax.collaborate import TextResult

SHORT = ("--max-new-tokens", 12)
SERVED = [name for name, row in of_kind("collaboration").items() if not collaboration.missing_inputs(row)]


def test_json_says_who_wrote_which_token(cli):
    options = ("--method", "entropy_adaptive", "--draft", "draft", "--set", "tau=0.3", "--set", "min_tokens=2", *SHORT)
    document = json.loads(cli("generate", "hello", *options, "--json").out)
    (entry,) = document["results"]
    target, tokenizer = specjax.load()
    draft, _ = specjax.load("draft")
    prompts = [tokenizer.chat("hello")]
    direct = specjax.collaborate.methods.entropy_adaptive(
        draft, target, prompts, key=measure.row_keys(0, [0]), max_new_tokens=12, eos=2, tau=0.3, min_tokens=2
    )
    count = int(direct.lengths[0])
    assert entry["token_ids"] == direct.to_lists()[0] and entry["authors"] == direct.authors[0, :count].tolist()
    assert {*entry["authors"]} == {0, 1}
    assert document["passes"] == direct.passes[0].tolist() == entry["passes"]
    assert document["share_of_target"] == float(direct.share(1)[0]) and document["left"] == 0
    assert document["options"] == {"tau": 0.3, "min_tokens": 2} and document["guarantee"] == "lossy"


@pytest.mark.parametrize("name", ["spec_reason", "momentum"])
def test_a_table_of_costs(cli, name):
    draft = ("--draft", "draft") if of_kind("collaboration")[name].needs else ()
    said = cli("generate", "hello", "--method", name, *draft, *SHORT).out
    assert f"{name} (guarantee: lossy)" in said and "passes of tiny" in said and "compilation included" in said
    assert ("written by the target" in said) == bool(draft)


def test_the_target_alone_beside_it(cli):
    document = json.loads(
        cli("generate", "hello", "--method", "first_finish", "--set", "samples=2", *SHORT, "--compare", "--json").out
    )
    assert document["baseline_tokens_per_second"] > 0 and not document["seconds_include_compilation"]


TEMPERATURES = {"cntp": 0.8, "first_finish": 1.0, "anchored": 1.0, "power_smc": 0.25}
"""Defaults of methods that sample; that of power_smc is 1 / alpha. The others are greedy."""


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("temperature", [None, 0.0, 0.5])
def test_a_temperature_is_obeyed_or_refused_and_recorded(monkeypatch, cli, refused, name, temperature):
    """The function gets what the flag says; without it, its own default; what it used is in the document."""
    row, calls = of_kind("collaboration")[name], []

    def spy(*models, **arguments):
        calls.append(arguments)
        one, each = np.ones((1, 1), np.int32), np.ones((1, len(models)), np.int32)
        return TextResult(7 * one, one[0], one[0] < 0, (), authors=one - 1, passes=each, read=each)

    spy.__signature__ = inspect.signature(row.make)
    monkeypatch.setattr(sys.modules[row.module], name, spy)
    draft = ("--draft", "draft") if row.needs & {"draft", "safe"} else ()
    flag = () if temperature is None else ("--temperature", temperature)
    command = ("generate", "hello", "--method", name, *draft, *flag, *SHORT, "--json")
    wrong = {"momentum": 0.5, "power_smc": temperature, "cntp": 0.0, "first_finish": 0.0, "anchored": 0.0}.get(name)
    if temperature is not None and wrong == temperature:
        assert "--temperature" in refused(*command) and not calls
        return
    used = json.loads(cli(*command).out)["settings"]["temperature"]
    assert used == (TEMPERATURES.get(name, 0.0) if temperature is None else temperature)
    assert [arguments.get("temperature") for arguments in calls] == [temperature]


def test_the_nucleus_of_a_method_is_used_and_a_flag_replaces_it():
    used = lambda **flags: collaboration.check_options("cntp", {}, GenerateSampling(**flags), ProcessingOptions())
    assert (used().top_p, used().temperature) == (0.9, 0.8) and used(top_p=1.0).top_p == 1.0
    assert collaboration.describe_sampling(used(min_p=0.1)) == "temperature 0.8, top-p 0.9, min-p 0.1"


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("cntp", ("--set", "n_max=0"), "--set n_max must be at least n_min, 1, not 0"),
        ("momentum", ("--top-k", 3), "--top-k would change the token that this method chooses"),
        ("momentum", ("--ban", "5", "--regex", "a+"), "--ban and --regex would change the token"),
        ("anchored", ("--draft", "draft", "--logit-bias", "5=2"), "--logit-bias would change a distribution"),
        ("power_smc", ("--top-p", 0.9), "--top-p leaves no mass where p^alpha has some"),
        ("power_smc", ("--set", "alpha=0.5"), "--set alpha must be at least 1, not 0.5"),
        ("fs_gen", ("--draft", "draft", "--set", "form=proxy"), 'form="proxy" needs tuned='),
        ("spec_reason", ("--draft", "draft", "--set", "max_step_tokens=0"), "--set max_step_tokens must be at least 1"),
        ("foreal", ("--draft", "draft", "--set", "p=1.5"), "--set p must be from 0 to 1, not 1.5"),
        ("entropy_adaptive", ("--draft", "draft", "--set", "window=0"), "--set window must be at least 1"),
        ("cntp", ("--checkpoint", "gs://bucket/texts"), "choose another one"),
        ("cntp", ("--top-p", 0), "--top-p must be above 0"),
    ],
)
def test_refusals_come_before_a_model_is_loaded(monkeypatch, refused, name, flags, words):
    def load(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(specjax, "load", load, raising=False)
    assert words in refused("generate", "hello", "--method", name, *flags, *SHORT)


def test_what_can_be_served():
    assert {"spec_reason", "speculative_thinking", "foreal", "entropy_adaptive", "fs_gen", "anchored"} <= {*SERVED}
    assert {"first_finish", "cntp", "power_smc", "momentum"} <= {*SERVED}


@pytest.mark.parametrize("name", SERVED)
def test_words_are_what_the_method_takes(name):
    """Of a method that is told something in words: the tokens that its function has parameters for."""
    _, tokenizer = specjax.load()
    found = collaboration.word_arguments(name, tokenizer, 259)
    assert set(found) <= set(inspect.signature(of_kind("collaboration")[name].make).parameters)
    row = of_kind("collaboration")[name]
    assert ("segmenter" in row.needs) == bool({"segmenter", "punctuation"} & set(found))
    assert ("judging" in row.needs) == ("digits" in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "reward_smc"], "cannot provide the reward of reward_smc; call specjax.collaborate"),
        (["--method", "arbitrage", "--draft", "draft"], "cannot provide the router of arbitrage; call"),
        (["--method", "spec_reason"], "method spec_reason needs a smaller model; add --draft MODEL"),
        (["--method", "anchored"], "method anchored needs a safe model; add --draft MODEL"),
        (["--method", "cntp", "--draft", "draft"], "method cntp uses one model only; remove --draft"),
        (["--method", "cntp", "--tree", "2x1"], "--tree does not apply to texts that several models"),
        (["--method", "cntp", "--adapt", "calm"], "--adapt does not apply to texts that several models"),
        (["--method", "cntp", "--set", "trials=3"], 'method cntp has no option "trials"'),
        (["--method", "power_smc", "--temperature", "1"], "temperature"),
        (["--method", "fs_gen", "--draft", "odd"], "vocabular"),
    ],
)
def test_what_does_not_fit(refused, arguments, words):
    assert words in refused("generate", "hello", *arguments, *SHORT)


FEW = ("--method", "entropy_adaptive", "--draft", "draft", "--batch-size", 2, *SHORT, "--json")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    return path


def same(document):
    return {name: value for name, value in document.items() if name not in ("date", "speedup") and "second" not in name}


@pytest.mark.parametrize("compare", [(), ("--compare",)])
def test_a_killed_run_goes_on_behind_its_last_batch(cli, prompts, tmp_path, monkeypatch, compare):
    command = ("generate", "--batch-file", prompts, *FEW, *compare)
    whole = json.loads(cli(*command).out)
    folder, written, asked = tmp_path / "kept", collaboration.Collaboration._write, []

    def killed(self, group, log):
        asked.append([row.ordinal for row in group])
        if 2 in asked[-1]:
            raise KeyboardInterrupt
        return written(self, group, log)

    monkeypatch.setattr(collaboration.Collaboration, "_write", killed)
    ended = cli(*command, "--checkpoint", folder)
    assert ended.code == 130 and json.loads(ended.out)["left"] == 1
    assert [path.name for path in folder.iterdir()] == ["batch-00000.json"]
    asked.clear()
    monkeypatch.setattr(collaboration.Collaboration, "_write", lambda *given: asked.append(0) or written(*given))
    again = json.loads(cli(*command, "--checkpoint", folder).out)
    assert same(again) == same(whole) and len(asked) == 1
    assert bool(again["baseline_tokens_per_second"]) == bool(compare)
    asked.clear()
    assert same(json.loads(cli(*command, "--checkpoint", folder).out)) == same(whole) and not asked


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seed", 1), "differs in settings;"),
        (("--logit-bias", "5=3"), "differs in settings;"),
        (("--set", "tau=0.1"), "differs in settings;"),
        (("--raw",), "differs in prompts;"),
        (("--target", "draft"), "differs in target;"),
    ],
)
def test_the_texts_of_another_run_are_not_taken(cli, refused, prompts, tmp_path, flags, words):
    command = ("generate", "--batch-file", prompts, *FEW, "--logit-bias", "5=2", "--checkpoint", tmp_path / "kept")
    assert cli(*command).code == 0
    assert words in refused(*command, *flags)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"run": 3, "batch": 4}', '{"run": {}, "batch": []}'])
def test_damaged_batches_are_refused(cli, refused, prompts, tmp_path, content):
    command = ("generate", "--batch-file", prompts, *FEW, "--checkpoint", tmp_path / "kept")
    assert cli(*command).code == 0
    (tmp_path / "kept" / "batch-00001.json").write_text(content)
    assert "kept" in refused(*command)


@pytest.mark.parametrize("token", [-1, 10**6, "a", None, [5]])
def test_tokens_that_are_none_are_refused(cli, refused, prompts, tmp_path, token):
    command = ("generate", "--batch-file", prompts, *FEW, "--checkpoint", tmp_path / "kept")
    assert cli(*command).code == 0
    path = tmp_path / "kept" / "batch-00001.json"
    document = json.loads(path.read_text())
    document["batch"][0][0][0][0] = token
    path.write_text(json.dumps(document))
    assert "batch 1 in" in refused(*command)


def test_where_batches_cannot_be_kept(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "choose another folder" in refused("generate", "hello", *FEW, "--checkpoint", tmp_path / "file")
    assert "choose another one" in refused("generate", "hello", *FEW, "--checkpoint", "gs://bucket/kept")
