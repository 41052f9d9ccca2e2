"""Complete models are written and read again bit by bit, by specjax and by transformers."""

from __future__ import annotations

import dataclasses
import json
import random

import jax
import numpy as np
import pytest
from tiers import those
from written_models import VARIANTS, drawn, words

import specjax
from specjax import UsageError, save_model


@pytest.mark.parametrize("name", those({"llama-bfloat16", "qwen2", "phi3", "gemma3"}, VARIANTS))
def test_what_is_written_is_read_bit_by_bit(name, tmp_path):
    config = VARIANTS[name]
    target = drawn(config)
    save_model(tmp_path, target, words())
    actual, tokenizer = specjax.load(tmp_path, dtype=config.dtype, stacked=config.stacked)
    plain = dataclasses.replace(actual.model.config, name=config.name, cache_bits=config.cache_bits)
    assert plain == config
    jax.tree.map(np.testing.assert_array_equal, actual.params, target.params)
    same = lambda one: (one.vocab, one.eos, one.chat_template, one.names["eos_token"], one.encode("w5 w7"))
    assert same(tokenizer) == same(words())


@pytest.mark.parametrize("name", those({"llama", "qwen3"}, [name for name in VARIANTS if name != "llama-bfloat16"]))
def test_transformers_reads_it_with_the_same_logits(name, tmp_path, tiny, texts):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    target = drawn(VARIANTS[name])
    save_model(tmp_path, target)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits, _ = tiny.reference(model.eval(), texts)
    assert np.std(logits[0]) > 0.3, "the reference must not be flat"
    for ours, theirs in zip(tiny.ours(target, texts)[0], logits, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_a_tokenizer_of_scores_is_written_with_a_list_of_merges(data, tmp_path):
    """stories260K has a SentencePiece tokenizer. The written one splits its texts alike, with the same vocabulary."""
    target, tokenizer = specjax.load(data / "stories260K" / "stories260K.bin")
    save_model(tmp_path, target, tokenizer)
    actual, other = specjax.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, actual.params, target.params)
    assert (other.vocab, other.eos) == (tokenizer.vocab, tokenizer.eos)
    rng = random.Random(0)
    words = ["Once", "upon", "a time", "girl's", "  ", "\n", "naïve", "Lily,", "🙂", "!", "3.14", "the", "wanted"]
    for _ in range(100):
        text = rng.choice(["", " "]).join(["I", *rng.choices(words, k=8)])
        ids = tokenizer.encode(text)
        assert other.encode(text) == ids
        assert other.decode(ids) == tokenizer.decode(ids) == text


def test_the_tokenizer_of_a_folder_is_copied(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    target = drawn(VARIANTS["llama"])
    save_model(first, target, words())
    (first / "special_tokens_map.json").write_text("{}")
    (first / "notes.txt").write_text("no")
    save_model(second, target, first)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {file.name for file in second.iterdir()} == names
    for name in names:
        assert (second / name).read_bytes() == (first / name).read_bytes()
    save_model(second, target, second)
    assert json.loads((second / "config.json").read_text())["eos_token_id"] == [2]


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    target = drawn(VARIANTS["llama"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written .*; choose another folder"):
        save_model(tmp_path / "file", target)
    both = dataclasses.replace(VARIANTS["qwen2"], qk_norm=True)
    with pytest.raises(UsageError, match=r"tiny has qkv_bias True, which a config.json of type qwen3 cannot express"):
        save_model(tmp_path, drawn(both))
    with pytest.raises(UsageError, match="has no config of"):
        save_model(tmp_path, dataclasses.replace(target, model=target.model._replace(config=None)))
    assert not list(tmp_path.glob("*.safetensors"))
