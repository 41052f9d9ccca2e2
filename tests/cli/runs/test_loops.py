"""`specjax generate` for methods with loops of their own."""

from __future__ import annotations

import json
import sys

import jax
import pytest
from heads import tiny_head
from tiers import those

import specjax
from specjax import decoders
from specjax.bench import measure

SHORT = ("--max-new-tokens", 8)
METHODS = {
    "ceed_vla": ("--set", "block=4"),
    "lud": ("--set", "pad_token=0", "--set", "threshold=0.1"),
    "superposed_decoding": ("--set", "drafts=2"),
    "pearl": ("--draft", "draft", "--set", "num_tokens=3"),
    "pearl_in_one_program": ("--draft", "draft", "--num-draft-tokens", 3),
}


def in_python(name, prompts, temperature):
    """The texts of the same call in Python."""
    target, tokenizer = specjax.load("target")
    draft = specjax.load("draft")[0]
    settings = {"max_new_tokens": 8, "eos": tokenizer.eos}
    keys = measure.row_keys(0, range(len(prompts)))
    if name.startswith("pearl"):
        if name == "pearl":
            target, draft = (jax.device_put(x, jax.devices()[i]) for i, x in enumerate((target, draft)))
        loop = getattr(decoders, name)
        return loop(target, draft, prompts, key=keys, num_tokens=3, temperature=temperature, **settings)
    if name == "lud":
        return decoders.lud(target, prompts, key=keys, pad_token=0, threshold=0.1, temperature=temperature, **settings)
    if name == "ceed_vla":
        return decoders.ceed_vla(target, prompts, key=keys, block=4, **settings)
    return decoders.superposed(target, prompts, drafts=2, temperature=temperature or 0.06, **settings)


@pytest.mark.parametrize("name", those(METHODS.keys() - {"pearl_in_one_program"}, METHODS))
def test_texts_are_those_of_python(cli, tmp_path, name):
    file = tmp_path / "prompts.txt"
    file.write_text("abcabc\nhello\n")
    temperature = () if name == "ceed_vla" else ("--temperature", 0.7)
    run = ("generate", "--batch-file", file, "--batch-size", 2, "--method", name, *METHODS[name], *temperature, *SHORT)
    result = cli(*run, "--json", "--compare")
    assert result.code == 0, result.err
    document, tokenizer = json.loads(result.out), specjax.load()[1]
    wanted = in_python(name, [tokenizer.chat(text) for text in ("abcabc", "hello")], 0.7 if temperature else 0.0)
    assert [row["token_ids"] for row in document["results"]] == wanted.to_lists()
    assert document["settings"]["temperature"] == (0.7 if temperature else 0.0)
    assert document["speedup"] > 0 and document["method"] == name
    assert document["identical"] is (True if name.startswith("pearl") else document["identical"])
    assert document["guarantee"] == specjax.METHODS[name].guarantee


def test_a_trained_head_is_needed(cli, refused, tmp_path):
    """The text is that of Python, and heads of other kinds are refused before any model is loaded."""
    target = specjax.load()[0]
    heads = {kind: tiny_head(kind, target) for kind in ("hamburger", "eagle")}
    for kind, head in heads.items():
        specjax.save_head(tmp_path / kind, head)
    run = ("generate", "hello", "--method", "hamburger_decoding", "--set", "confidence=0.2", *SHORT)
    (tmp_path / "hamburger" / "card.json").write_text('{"system": "Be brief."}')
    result = cli(*run, "--draft", tmp_path / "hamburger", "--json")
    assert "the drafter was trained with --system" in " ".join(result.err.split())
    document = json.loads(result.out)
    prompts = [specjax.load()[1].chat("hello")]
    wanted = decoders.hamburger(
        target, heads["hamburger"], prompts, key=measure.row_keys(0, [0]), max_new_tokens=8, confidence=0.2, eos=(2,)
    )
    assert document["results"][0]["token_ids"] == wanted.to_lists()[0]
    assert document["target_passes"] == int(wanted.stats.target_passes[0]) and document["head"] == "hamburger"
    for files, words in (
        (("--draft", tmp_path / "eagle"), "is a draft head of kind eagle, and method hamburger_decoding needs one of"),
        (("--draft", "draft"), "is no draft head of a known kind, and method hamburger_decoding needs one of kind ham"),
        ((), "method hamburger_decoding needs a draft head of the target; add --draft HEAD"),
    ):
        assert words in refused(*run, *files)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("lud",),
            "method lud needs pad_token, the id of the padding token that the model was trained with",
        ),
        (("lud", "--set", "pad_token=259"), "--set pad_token must be a token of the model, below 259, not 259"),
        (("lud", "--set", "pad_token=1", "--set", "slots=-1"), "--set slots must be a whole number from 0 to 2048"),
        (("lud", "--set", "pad_token=1", "--temperature", -1), "--temperature must be at least 0"),
        (
            ("lud", "--set", "pad_token=1", "--min-p", 0.1),
            "--min-p 0.1 does not apply to method lud, which takes",
        ),
        (("ceed_vla", "--temperature", 0.7), "--temperature 0.7 does not apply to method ceed_vla, which is greedy"),
        (("ceed_vla", "--draft", "draft"), "--draft is a draft model, and ceed_vla does not use one"),
        (("ceed_vla", "--controller", "goodput"), "--controller does not apply to a method with a loop of its own"),
        (("ceed_vla", "--ban", "a"), "--ban does not apply to a method with a loop of its own"),
        (("ceed_vla", "--num-draft-tokens", 3), "--num-draft-tokens does not apply to method ceed_vla"),
        (("superposed_decoding", "--temperature", 0), "--temperature must be above 0, not 0"),
        (("superposed_decoding", "--set", "drafts=12"), "--set drafts must be at most candidates, 9, not 12"),
        (("superposed_decoding", "--datastore", "none"), "--datastore"),
        (
            ("lud", "--set", "pad_token=1", "--set", "slots=100000000"),
            "--set slots must be a whole number from 0 to 2048, not 100000000",
        ),
        (("ceed_vla", "--set", "block=1000000"), "--set block must be a whole number from 1 to 4096, not 1000000"),
        (("pearl",), "method pearl needs a draft model; add --draft MODEL"),
        (
            ("pearl", "--draft", "draft", "--set", "num_tokens=0"),
            "--set num_tokens must be a whole number",
        ),
        (("continuous", "--draft", "draft"), "cannot load the inputs of continuous; call specjax.decoders.continuous"),
    ],
)
def test_refusals_name_the_flag(refused, flags, words):
    assert words in refused("generate", "hello", "--method", *flags, *SHORT)


@pytest.mark.parametrize(("flags", "calls"), [((), 1), (("--compare",), 2)])
def test_a_loop_runs_once_unless_times_are_compared(cli, monkeypatch, flags, calls):
    run, runs = measure.run_loop, []
    monkeypatch.setattr(measure, "run_loop", lambda *arguments: runs.append(1) or run(*arguments))
    document = json.loads(cli("generate", "abcabc", "--method", "ceed_vla", *flags, *SHORT, "--json").out)
    assert len(runs) == calls and document["tokens_per_second"] > 0


def test_pearl_needs_two_devices(refused, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    words = refused("generate", "hello", "--method", "pearl", "--draft", "draft", *SHORT)
    assert "method pearl runs each model on its own device, and this machine has 1; use --method two_model" in words


def test_a_measured_draft_length_holds_for_the_run(cli, monkeypatch, tmp_path):
    """Times vary, so each call measures another length here. Only the first one counts."""
    module, lengths = sys.modules["specjax.decoders.pearl"], iter((3, 2, 5))
    monkeypatch.setattr(module, "_measure", lambda roles, caches, start: (next(lengths), caches))
    file = tmp_path / "prompts.txt"
    file.write_text("abcabc\nhello\n")
    result = cli("generate", "--batch-file", file, "--method", "pearl", "--draft", "draft", *SHORT, "--json")
    assert result.code == 0 and "drafts have 3 tokens, by the times of both models" in result.err
    assert len(json.loads(result.out)["acceptance_by_depth"]) == 3 and next(lengths) == 2


def test_weights_that_are_no_numbers_are_named(refused, monkeypatch):
    load = specjax.load

    def spoiled(*arguments, **options):
        target, tokenizer = load(*arguments, **options)
        return specjax.Target(target.model, jax.tree.map(lambda x: x * float("nan"), target.params)), tokenizer

    monkeypatch.setattr(specjax, "load", spoiled, raising=False)
    assert "--target: the model tiny returns NaN or Inf" in refused("generate", "a", "--method", "ceed_vla", *SHORT)


def test_bench_compares_them_with_plain_decoding(cli, refused, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abcabc"}\n')
    run = ("bench", file, "--out", tmp_path / "out.json", "--repeats", 1, *SHORT, "--json")
    methods = ("--method", "pearl", "--method", "prompt_lookup", "--method", "ceed_vla", "--draft", "draft")
    result = cli(*run, *methods, "--set", "pearl.num_tokens=3")
    assert result.code == 0, result.err
    overall = json.loads(result.out)["overall"]
    assert overall["pearl"]["identical"] and overall["prompt_lookup"]["identical"]
    assert overall["ceed_vla"]["guarantee"] == "lossy" and overall["pearl"]["speedup"] > 0
    document = json.loads(cli(*run, "--method", "superposed_decoding", "--temperature", 0.5).out)
    assert document["overall"]["superposed_decoding"]["identical"] is None and not document["differences"]
    words = refused(*run, *methods, "--controller", "goodput")
    assert "--controller does not apply to a method with a loop of its own" in words
