"""`specjax generate` of texts that several models or samples write."""

import inspect
import json

import pytest

import specjax
from specjax.bench import measure
from specjax.catalog import of_kind
from specjax.cli.runs import collaboration

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
