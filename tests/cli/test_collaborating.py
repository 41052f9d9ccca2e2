"""`specjax generate` of texts that several models or samples write."""

import inspect
import json

import pytest

import specjax
from specjax.bench import measure
from specjax.catalog import of_kind
from specjax.cli import collaborating

SHORT = ("--max-new-tokens", 12)
SERVED = [name for name, row in of_kind("collaboration").items() if not collaborating.lacking(row)]


def test_json_says_who_wrote_which_token(cli):
    options = ("--method", "entropy_adaptive", "--draft", "draft", "--set", "tau=0.3", "--set", "least=2", *SHORT)
    document = json.loads(cli("generate", "hello", *options, "--json").out)
    (entry,) = document["results"]
    target, tokenizer = specjax.load()
    draft, _ = specjax.load("draft")
    prompts = [tokenizer.chat("hello")]
    direct = specjax.collaborate.methods.entropy_adaptive(
        draft, target, prompts, key=measure.row_keys(0, [0]), max_new_tokens=12, eos=2, tau=0.3, least=2
    )
    count = int(direct.lengths[0])
    assert entry["token_ids"] == direct.to_lists()[0] and entry["authors"] == direct.authors[0, :count].tolist()
    assert {*entry["authors"]} == {0, 1}
    assert document["passes"] == direct.passes[0].tolist() == entry["passes"]
    assert document["share_of_target"] == float(direct.share(1)[0]) and document["left"] == 0
    assert document["options"] == {"tau": 0.3, "least": 2} and document["guarantee"] == "lossy"


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
    found = collaborating.words(name, tokenizer, 259)
    assert set(found) <= set(inspect.signature(of_kind("collaboration")[name].make).parameters)
    row = of_kind("collaboration")[name]
    assert ("segmenter" in row.needs) == bool({"segmenter", "punctuation"} & set(found))
    assert ("judging" in row.needs) == ("digits" in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "reward_smc"], "cannot give reward_smc its reward; call specjax.collaborate"),
        (["--method", "arbitrage", "--draft", "draft"], "cannot give arbitrage its router; call"),
        (["--method", "spec_reason"], "method spec_reason needs a smaller model beside the target; give --draft"),
        (["--method", "anchored"], "method anchored needs a safe model beside the target; give --draft"),
        (["--method", "cntp", "--draft", "draft"], "method cntp has no use for a second model; leave --draft out"),
        (["--method", "cntp", "--tree", "2x1"], "--tree is not of texts that several models"),
        (["--method", "cntp", "--adapt", "calm"], "--adapt is not of texts that several models"),
        (["--method", "cntp", "--set", "trials=3"], 'method cntp has no option "trials"'),
        (["--method", "power_smc", "--temperature", "1"], "temperature"),
        (["--method", "fs_gen", "--draft", "odd"], "vocabular"),
    ],
)
def test_what_does_not_fit(refused, arguments, words):
    assert words in refused("generate", "hello", *arguments, *SHORT)
