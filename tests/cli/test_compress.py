"""`specjax generate --compress`: a target that reads a part of the prompt."""

import json
import time

import pytest
from toy import markov

import specjax
from specjax import compression
from specjax.bench import measure
from specjax.compression import Compression

PROMPT = "The river is long, and the secret word is heron. " * 3 + "Say it."
FLAGS = ("--max-new-tokens", 12)
SPEC = "specpc:60,window=16,kernel=8"
OPTIONS = {"window": 16, "kernel": 8}
CACHE = "speckv:20,window=8"


def texts(prompts):
    target, _ = specjax.load()
    options = {"key": measure.row_keys(0, [0]), "max_new_tokens": 12, "eos": 2}
    return specjax.decode(target, "autoregressive", prompts, **options).to_lists()[0]


@pytest.mark.parametrize(("more", "source"), [((), None), (("--draft", "draft"), "draft")])
def test_the_text_is_that_of_the_compressed_prompt(cli, more, source):
    """Speculation and plain decoding read the same tokens, which the model of --draft or the target selects."""
    document = json.loads(cli("generate", PROMPT, "--compress", SPEC, *more, *FLAGS, "--json", "--compare").out)
    model, tokenizer = specjax.load(source)
    complete = tokenizer.chat(PROMPT)
    prompts = compression.specpc(model, [complete], 60, **OPTIONS)
    [result] = document["results"]
    assert result["token_ids"] == texts(prompts) != texts([complete])
    assert (result["prompt_tokens"], result["complete_prompt_tokens"]) == (60, len(complete))
    assert document["identical"] and document["compress"] == SPEC and document["adapt"] is None
    assert document["guarantee"] == "lossy" and document["guarantee_to_compressed_prompts"] == "distribution"


def test_another_model_selects_the_tokens(cli):
    document = json.loads(cli("generate", PROMPT, "--compress", f"{SPEC},draft=draft", *FLAGS, "--json").out)
    complete = specjax.load()[1].chat(PROMPT)
    prompts = compression.specpc(specjax.load("draft")[0], [complete], 60, **OPTIONS)
    assert document["results"][0]["token_ids"] == texts(prompts)
    assert document["draft"] is None


def test_the_table_says_that_it_is_lossy(cli):
    result = cli("generate", PROMPT, "--compress", SPEC, *FLAGS, "--compare")
    out = " ".join(result.out.replace("│", " ").split())
    assert f"lossy; distribution relative to the target on prompts compressed by {SPEC}" in out
    assert "60 of 156, selected by tiny" in out
    assert f"identical to plain decoding of the target on prompts compressed by {SPEC}" in out
    assert f"lossy: {SPEC} selects the tokens of prompts" in " ".join(result.err.split())


def test_short_prompts_stay(cli):
    document = json.loads(cli("generate", "hello", "--compress", "specpc", *FLAGS, "--json").out)
    [result] = document["results"]
    assert result["prompt_tokens"] == result["complete_prompt_tokens"] == 7
    assert document["guarantee"] == "distribution" and "guarantee_to_compressed_prompts" not in document


@pytest.mark.parametrize("draft", [None, "draft"])
def test_the_text_is_that_of_the_compressed_cache(cli, draft):
    """Speculation and plain decoding keep the same keys, after the model of --draft or the target has looked ahead."""
    more = () if draft is None else ("--draft", draft)
    document = json.loads(cli("generate", PROMPT, "--compress", CACHE, *more, *FLAGS, "--json", "--compare").out)
    (target, tokenizer), complete = specjax.load(), specjax.load()[1].chat(PROMPT)
    small = compression.speckv(target, draft and specjax.load(draft)[0], 12, 20, window=8)
    options = {"key": measure.row_keys(0, [0]), "max_new_tokens": 12, "eos": tokenizer.eos}
    [result] = document["results"]
    assert [result["token_ids"]] == specjax.decode(small, "autoregressive", [complete], **options).to_lists()
    assert result["token_ids"] != texts([complete])
    assert (result["prompt_tokens"], result["kept_prompt_tokens"]) == (len(complete), 21)
    assert document["identical"] and document["compress"] == CACHE and document["compress_seconds"] == 0
    assert document["guarantee"] == "lossy" and document["guarantee_to_compressed_caches"] == "distribution"


def test_a_large_capacity_is_not_lossy(cli):
    result = cli("generate", "hello", "--compress", "speckv", *FLAGS)
    out = " ".join(result.out.replace("│", " ").split())
    assert "guarantee: distribution" in out and "lossy" not in out and "7 of 7 in the cache" in out
    assert "speckv drops nothing, because all prompts are short enough" in " ".join(result.err.split())


def test_times_include_the_compression(cli, monkeypatch):
    """A compression that takes three seconds more is a part of all times."""
    shorten = Compression.shorten

    def slow(*arguments):
        time.sleep(3)
        return shorten(*arguments)

    monkeypatch.setattr(Compression, "shorten", slow)
    document = json.loads(cli("generate", PROMPT, "--compress", SPEC, *FLAGS, "--json", "--compare").out)
    assert document["seconds"] > document["compress_seconds"] > 3 and document["time_to_first_token"] > 3
    assert document["tokens_per_second"] == pytest.approx(document["tokens"] / document["seconds"])
    assert document["baseline_tokens_per_second"] < 12 / 3 and 0.5 < document["speedup"] < 2


def test_the_row_of_the_method(cli):
    assert "specjax generate PROMPT --compress specpc" in cli("methods", "specpc").out
    assert "shortens prompts or their caches; run specjax generate PROMPT --compress" in cli("methods", "speckv").out
    assert "compression of prompts" in cli("methods").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compress", "speckv:8"], "--compress: capacity must be above 32, the last tokens that always stay, not 8"),
        (
            ["--compress", "speckv", "--same-bits"],
            "--same-bits does not apply to --compress speckv, because",
        ),
        (["--compress", "specpc:0"], "--compress: budget must be a whole number of at least 1, not 0"),
        (
            ["--compress", "auto"],
            '--compress: "auto" is not a method that compresses prompts; choose one of speckv, specpc',
        ),
        (["--compress", "specpc", "--adapt", "unified"], "--compress and --adapt both change the text"),
        (["--compress", SPEC + ",draft=odd"], "--compress: its vocabulary differs from the target's, first at id 7"),
        (["--compress", SPEC + ",draft=none"], '--compress: there is no file or folder "none"'),
        (["--compress", SPEC + ",first_layer=1"], "--compress: first_layer must be below the 1 layers of the draft"),
        (["--compress", "specpc", "--method", "llada"], "--compress applies to autoregressive models"),
        (["--compress", "specpc", "--method", "cntp"], "--compress "),
        (["--compress", "specpc", "--method", "superposed_decoding"], "--compress does not apply to a method with a"),
        (["--method", "specpc"], "method specpc compresses prompts and is not a drafter; use --compress specpc"),
    ],
)
def test_what_does_not_fit(refused, arguments, words):
    assert words in refused("generate", PROMPT, *arguments, *FLAGS)


def test_a_target_without_keys_and_values(refused, monkeypatch):
    tokenizer = specjax.load()[1]
    monkeypatch.setattr(specjax, "load", lambda *args, **options: (markov(), tokenizer))
    words = refused("generate", "a", "--compress", "specpc", *FLAGS)
    assert "--compress: the model markov has no cache of keys and values on one device, which specpc needs" in words
