"""Complete models are written and read again bit by bit, by specjax and by transformers."""

from __future__ import annotations

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tiers import those

import specjax
from specjax import Target, UsageError, save_model
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.gemma3 import Gemma3Config
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer
from specjax.models.rotary import RopeScaling

VOCAB = 96
SHAPES = dict(
    vocab_size=VOCAB, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=48, max_positions=128,
    name="tiny",
)  # fmt: skip
LLAMA3 = RopeScaling("llama3", 4.0, 1.0, 4.0, 16)
LONGROPE = RopeScaling(
    "longrope", 4.0, original_positions=10, amplitude=1.2, short=(1.0,) * 6, long=(1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
)
BEHIND = dict(norms="after", qk_norm=True, qk_norm_scope="projection")
YARN = RopeScaling("yarn", 4.0, 1.0, 2.0, 16, 1.1)

VARIANTS = {
    "llama": LlamaConfig(**SHAPES, rope_base=500.0, rope_scaling=LLAMA3),
    "llama-bfloat16": LlamaConfig(**SHAPES, tied=False, rope_scaling=YARN, dtype="bfloat16", stacked=True),
    "mistral": LlamaConfig(**SHAPES, window=5, rope_scaling=RopeScaling("linear", 3.0)),
    "qwen2": LlamaConfig(**SHAPES, qkv_bias=True, norm_eps=1e-6, stacked=True),
    "qwen3": LlamaConfig(**SHAPES, qk_norm=True, tied=False),
    "qwen2-some-windows": LlamaConfig(**SHAPES, qkv_bias=True, window=5, is_global=(True, False)),
    "ministral": LlamaConfig(**SHAPES, window=5, is_global=(False, True)),
    "phi3": LlamaConfig(**SHAPES | {"width": 64}, rotary_dim=12, rope_scaling=LONGROPE, window=7),
    "olmo2": LlamaConfig(**SHAPES, **BEHIND, rope_scaling=YARN),
    "olmo3": LlamaConfig(
        **SHAPES, **BEHIND, rope_base=500.0, rope_scaling=YARN, window=5, is_global=(False, True),
        local_rope_base=500.0, stacked=True,
    ),
    "gemma2": Gemma3Config(
        **SHAPES | {"width": 64}, is_global=(False, True), window=5, qk_norm=False, local_rope_base=None,
        query_scale=24**-0.5, attention_softcap=2.0, logit_softcap=3.0,
    ),
    "gemma3": Gemma3Config(**SHAPES, is_global=(False, True), window=5, query_scale=24**-0.5),
}  # fmt: skip


def drawn(config) -> Target:
    """Draw random parameters, all different, and large enough that every part matters."""
    shapes = init_params(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    size = lambda x: 0.3 + (x.shape[-1] ** -0.5 if x.ndim > 1 + config.stacked else 0.0)
    draw = lambda x: 1.0 * (x.ndim == 1 + config.stacked) + size(x) * rng.normal(size=x.shape)
    values = [jnp.asarray(draw(x), jnp.bfloat16).astype(x.dtype) for x in leaves]  # so that w - 1 is exact
    return Target(make_model(config), jax.tree.unflatten(tree, values))


def words() -> Tokenizer:
    vocab = ["<unk>", "a", "</s>", *(f"w{i}" for i in range(3, VOCAB))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(LibraryCodec(backend), tuple(vocab), (2,), "{{ messages[0].content }}", {"eos_token": "</s>"})


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
