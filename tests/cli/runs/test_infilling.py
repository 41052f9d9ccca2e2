"""`specjax generate --method any_subset` on a tiny any-order model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_decoders import exact

from specjax import UsageError, decoders
from specjax.bench import measure
from specjax.cli.runs.loops import infilling
from specjax.engine.results import zero_stats

LETTERS = "ab_"  # the last one stands for a missing token


class LetterTokenizer:
    """A tokenizer with one token per letter of LETTERS."""

    eos = ()
    template_args: dict = {}  # noqa: RUF012

    def encode(self, text, *, special=True):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[i] for i in ids)


@pytest.fixture
def model(monkeypatch):
    """An exact model of texts of four letters, loaded from "any-order"."""
    plain = exact(jnp.asarray(np.random.default_rng(0).random((3,) * 4)))
    result = decoders.AnySubsetModel(plain.apply, 3, 2, plain.params, name="toy")

    def load(source):
        if source != "any-order":
            raise UsageError(f"{source} is no any-order model")
        return result, LetterTokenizer()

    monkeypatch.setattr(infilling, "load_any_order", load)
    return result


RUN = ("generate", "--method", "any_subset", "--target", "any-order", "--max-new-tokens", 3)


@pytest.mark.parametrize("temperature", [(), ("--temperature", 0)])
def test_missing_tokens_are_those_of_python(cli, model, tmp_path, temperature):
    """Compare with Python, whose temperature is 1 by default. At temperature 0 every window gives one text."""
    file = tmp_path / "prompts.txt"
    file.write_text("a__b\nb\n")
    result = cli(
        *RUN, "--batch-file", file, "--batch-size", 2, "--set", "window=2", *temperature, "--json", "--compare"
    )
    assert result.code == 0, result.err
    document = json.loads(result.out)
    tokens, missing, lengths = decoders.blank_prompts(model, [[0, 2, 2, 1], [1]], 3)
    assert missing.tolist() == [[False, True, True, False], [False, True, True, True]]
    greedy = {"temperature": 0.0} if temperature else {}
    wanted = decoders.any_subset(
        model, tokens, missing, key=measure.row_keys(0, [0, 1]), lengths=lengths, window=2, **greedy
    )
    assert [row["token_ids"] for row in document["results"]] == wanted.to_lists()
    texts = ["".join(LETTERS[i] for i in row) for row in np.asarray(jax.device_get(wanted.filled))]
    assert [row["text"] for row in document["results"]] == texts and texts[0][0] + texts[0][3] == "ab"
    assert document["settings"]["temperature"] == (0.0 if temperature else 1.0) and document["target"] == "toy"
    assert document["identical"] is (True if temperature else None) and document["speedup"] > 0


def test_prompts_of_many_lengths_share_few_programs(cli, monkeypatch, tmp_path):
    """Sizes are 1 or 1.5 times a power of two, and each batch runs once if nothing is compared."""
    shapes, model = [], decoders.AnySubsetModel(None, 3, 2, name="toy")

    def fill(model, tokens, missing, *, lengths, **options):
        shapes.append(tokens.shape)
        new = jnp.zeros(tokens.shape, jnp.int32)
        return decoders.AnySubsetResult(
            new, missing.sum(1), lengths < 0, zero_stats(len(tokens), 1), finite=lengths > 0, filled=new
        )

    monkeypatch.setattr(infilling, "load_any_order", lambda source: (model, LetterTokenizer()))
    monkeypatch.setattr(infilling, "any_subset", fill)
    file = tmp_path / "prompts.txt"
    file.write_text("".join("a" * length + "_\n" for length in (4, 5, 6, 7, 8, 11)))
    document = json.loads(cli(*RUN, "--batch-file", file, "--json").out)
    assert [row["text"] for row in document["results"]][::5] == ["aaaaa", "a" * 12]
    assert [size for _, size in shapes] == [6, 6, 8, 8, 12, 12]


def test_the_text_is_printed(cli, model):
    out = cli(*RUN, "a__b", "--temperature", 0, "--compare").out
    assert (
        "outputs: identical to those with one token per call" in out and "any_subset (guarantee: distribution)" in out
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target", "draft"), "--target: draft is no any-order model"),
        (("--set", "window=0"), "--set window must be a whole number from 1 to 4096, not 0"),
        (("--min-p", 0.1), "--min-p 0.1 does not apply to method any_subset"),
        (("--dtype", "bfloat16"), "--dtype does not apply to any-order models"),
        (("--stop-string", "a"), "--stop-string does not apply to filled texts"),
        (("--system", "a"), "--system needs a chat template"),
    ],
)
def test_refusals_name_the_flag(refused, model, flags, words):
    assert words in refused(*RUN, "a_", *flags)


def test_a_target_is_needed_and_bench_has_no_missing_tokens(refused, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab"}\n')
    words = refused("bench", file, "--method", "any_subset", "--out", tmp_path / "out.json")
    assert "--method any_subset fills in missing tokens, which the prompts of bench do not have" in words
    words = refused("generate", "a", "--method", "any_subset")
    assert "method any_subset needs an any-order model, the folder of an XLNet language model; add --target" in words
