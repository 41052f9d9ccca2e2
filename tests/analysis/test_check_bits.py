"""check_bits on tiny models: nothing differs where the model promises that, and something does where it does not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.analysis import check_bits as check_bits_module
from specjax.analysis.check_bits import PassOutput, _BitProbe, check_bits
from specjax.engine.prefill import CHUNK
from specjax.errors import UsageError
from specjax.models import Gemma3Config, LlamaConfig, init_params, make_model
from specjax.models.rotary import RopeScaling

LLAMA = LlamaConfig(
    vocab_size=61, width=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=40, max_positions=512,
    dtype="bfloat16", same_bits=True,
)  # fmt: skip
GEMMA = Gemma3Config(
    vocab_size=61, width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=40,
    is_global=(False, True), window=9, dtype="bfloat16", same_bits=True, attention_softcap=20.0,
)  # fmt: skip
TEXT = list(np.random.default_rng(0).integers(0, 61, 72))
FEW: dict = {"widths": (7,), "batches": (), "capacities": ()}  # each is a program to compile
MORE = {"widths": (2, 7), "batches": (3,), "capacities": (1024,)}
MODELS = {
    "llama": LLAMA,
    "qwen": dataclasses.replace(LLAMA, qkv_bias=True, qk_norm=True, tied=False, num_heads=2),
    "phi and olmo": dataclasses.replace(
        LLAMA, rotary_dim=12, qk_norm=True, qk_norm_scope="projection", norms="both", logit_softcap=3.0,
        rope_scaling=RopeScaling("yarn", 4.0, 1.0, 2.0, 16, 1.3),
    ),
    "gemma": GEMMA,
    "stacked": dataclasses.replace(LLAMA, stacked=True),
    "bits": dataclasses.replace(LLAMA, cache_bits=True),
    "int8": dataclasses.replace(LLAMA, cache_dtype="int8"),
}  # fmt: skip


def target_of(config) -> specjax.Target:
    params = jax.tree.map(lambda x: (2 * x).astype(x.dtype), init_params(config, jax.random.key(0)))
    return specjax.Target(make_model(config), params)


REPEAT = [
    pytest.param(name, marks=pytest.mark.exhaustive)
    for name in ("llama", "qwen", "phi and olmo", "stacked", "bits", "int8")
]


@pytest.mark.parametrize("name", ["gemma", *REPEAT])
def test_a_model_of_the_same_bits(name):
    promises = check_bits(target_of(MODELS[name]), TEXT, **(FEW if name == "gemma" else MORE))
    assert [p for p in promises if p.differ] == []
    assert {p.name for p in promises} >= {"7 tokens in a pass", "a tree around 3 tokens", "read as a prompt"}
    assert all(p.compared >= 33 for p in promises), "half of the text, in passes of up to 7 tokens"


def test_over_a_mesh():
    """Sums over four devices, two of them with a copy of a key/value head, have one order in every pass."""
    config = dataclasses.replace(LLAMA, num_heads=8, mlp_width=48)
    target = specjax.shard(target_of(config), specjax.mesh(model=4))
    assert [p for p in check_bits(target, TEXT, **FEW) if p.differ] == []


@pytest.mark.parametrize("axis", ["data", "sequence"])
def test_meshes_that_split_rows_or_slots_are_refused(axis):
    with pytest.raises(UsageError, match=f'splits rows or slots; set its axis "{axis}" to 1'):
        specjax.shard(target_of(LLAMA), specjax.mesh(**{axis: 2}, model=1))


def test_a_model_without_them_is_told():
    promises = check_bits(target_of(dataclasses.replace(LLAMA, same_bits=False)), TEXT, **FEW)
    worst = max(promises, key=lambda p: p.differ)
    assert worst.differ and worst.largest > 0 and worst.first is not None and worst.first.startswith("layer ")


def test_a_prompt_is_read_in_wide_chunks_where_decode_does(monkeypatch):
    """TPUs and GPUs read 512 tokens at a time while the prompt lasts."""
    probe, widths = _BitProbe(target_of(LLAMA), np.zeros(3 * CHUNK + 9, np.int32), 3 * CHUNK), []
    logits = lambda width: (np.zeros((width, 3)), np.zeros((0, width, 1)))
    monkeypatch.setattr(
        probe,
        "run_pass",
        lambda cache, tokens, *rest: (PassOutput(*logits(tokens.shape[1])), widths.append(tokens.shape[1])),
    )
    monkeypatch.setattr(check_bits_module, "_begin", lambda *arguments: None)
    monkeypatch.setattr(check_bits_module, "_commit", lambda *arguments: None)
    assert len(probe.as_prompt()) == 9 and widths == [CHUNK] * 4
    widths.clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert len(probe.as_prompt()) == 9 and widths == [4 * CHUNK]


def test_a_long_prompt_is_read_in_chunks(monkeypatch):
    """The probe reads a long prompt in the chunks of `decode`: scores of a whole one would take the square of its
    length."""
    text = np.resize(np.array(TEXT, np.int32), CHUNK + 5)
    plainly = dataclasses.replace(LLAMA, same_bits=False, dtype="float32")  # whose program is compiled sooner
    ask, widths = _BitProbe(target_of(plainly), text, CHUNK - 2), []
    see = ask.run_pass
    monkeypatch.setattr(
        ask,
        "run_pass",
        lambda cache, tokens, *arguments: widths.append(tokens.shape[1]) or see(cache, tokens, *arguments),
    )
    prompt_outputs = ask.as_prompt()
    assert widths == [CHUNK, CHUNK]
    plain = ask.one_by_one()
    assert prompt_outputs.keys() == plain.keys() == set(range(CHUNK - 2, CHUNK + 5))
    for at in plain:
        np.testing.assert_allclose(prompt_outputs[at].logits, plain[at].logits, atol=1e-4)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.9])
def test_texts_are_those_of_plain_decoding(temperature):
    """Speculative texts are those of plain decoding where rounding would part some of them: compare the test above."""
    target, prompts = target_of(MODELS["bits"]), [TEXT[:40] + TEXT[:20], TEXT[20:45]]
    settings = {"key": jax.random.key(1), "max_new_tokens": 48, "temperature": temperature}
    plain = specjax.decode(target, "autoregressive", prompts, **settings)
    result = specjax.decode(target, specjax.drafters.token_recycling(61, num_nodes=7), prompts, **settings)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert int(jnp.sum(result.stats.accepted)) > 0


def test_texts_that_are_too_short_or_too_long():
    with pytest.raises(specjax.UsageError, match="the text has 5 tokens; a width of 7 needs at least 14"):
        check_bits(target_of(LLAMA), TEXT[:5], **FEW)
    with pytest.raises(specjax.UsageError, match="the text has 720 tokens, but the model reads at most 512"):
        check_bits(target_of(LLAMA), TEXT * 10, **FEW)
