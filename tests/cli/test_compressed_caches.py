"""`--cache-dtype gear:...`: a target whose older keys and values take a few bits."""

import json

import pytest

import specjax
from specjax import compression
from specjax.bench import measure

PROMPT = "The river is long, and the secret word is heron. " * 2 + "Say it."
FORM = "gear:2,block=16"
FLAGS = ("--max-new-tokens", 24)
DRAFT = ("--draft", "draft", "--method", "two_model")


def text(target, prompt):
    options = {"key": measure.row_keys(0, [0]), "max_new_tokens": 24, "eos": 2}
    return specjax.decode(target, "autoregressive", [prompt], **options).to_lists()[0]


@pytest.mark.parametrize("more", [(), DRAFT])
def test_the_text_is_that_of_the_compressed_model(cli, more):
    """It is plain text and speculative text alike. The draft model keeps a plain cache, which can rewind."""
    document = json.loads(cli("generate", PROMPT, "--cache-dtype", FORM, *more, *FLAGS, "--json", "--compare").out)
    target, tokenizer = specjax.load()
    prompt = tokenizer.chat(PROMPT)
    [result] = document["results"]
    assert result["token_ids"] == text(compression.gear(target, 2, block=16), prompt) != text(target, prompt)
    assert document["identical"] and document["cache_dtype"] == FORM and document["cache_guarantee"] == "lossy"
    assert document["guarantee"] == "lossy" and document["guarantee_to_compressed_cache"] == "distribution"


def test_the_table_says_that_it_is_lossy(cli):
    result = cli("generate", PROMPT, "--cache-dtype", FORM, *FLAGS, "--compare")
    out = " ".join(result.out.replace("│", " ").split())
    assert f"lossy; distribution relative to the target with the cache {FORM}" in out
    assert f"identical to plain decoding of the target with the cache {FORM}" in out
    assert f"lossy: {FORM} compresses the cache of" in " ".join(result.err.split())


def test_other_caches_have_no_such_label(cli):
    document = json.loads(cli("generate", "hello", "--cache-dtype", "int8", *FLAGS, "--json").out)
    assert "cache_guarantee" not in document and document["guarantee"] == "distribution"


def test_the_row_of_the_method(cli):
    shown = cli("methods", "gear").out
    assert "specjax generate PROMPT --cache-dtype gear" in shown and "guarantee: lossy" in shown
    assert "compression of caches" in cli("methods").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cache-dtype", "gear:3"], "--cache-dtype: bits must be 2, 4 or 8, not 3"),
        (
            ["--cache-dtype", "gear:4,block=63"],
            "--cache-dtype: block must be one of 4, 8, 16, 32, 64, 128, 256, not 63",
        ),
        (["--cache-dtype", "gear:4,size=2"], '"gear:4,size=2": gear takes bits=N, block=N, rank=N, outliers=X'),
        (["--cache-dtype", "int4"], '--cache-dtype must be "int8", gear:BITS or left out, not "int4"'),
        (["--cache-dtype", FORM, "--adapt", "unified"], "and --adapt both change the text"),
        (["--cache-dtype", FORM, "--compress", "specpc"], "and --compress both change the text"),
        (["--cache-dtype", FORM, "--method", "swift"], "swift"),
        (["--cache-dtype", FORM, "--method", "sparse_cache"], "has no cache of keys and values on one device"),
        (["--cache-dtype", FORM, "--method", "cntp"], f'use the cache dtype "int8" or the default instead of "{FORM}"'),
        (["--cache-dtype", FORM, "--same-bits"], "same"),
        (["--method", "gear"], "method gear compresses the cache and is not a drafter; use --cache-dtype gear"),
    ],
)
def test_what_does_not_fit(refused, arguments, words):
    assert words in refused("generate", PROMPT, *arguments, *FLAGS)
