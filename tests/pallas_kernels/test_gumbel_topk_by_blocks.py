"""The best of a vocabulary in blocks, against a sort in NumPy and against the whole head."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax.models import Gemma3Config, init_params, make_model
from specjax.pallas_kernels.gumbel_topk import by_blocks
from specjax.pallas_kernels.gumbel_topk.by_blocks import best_by_blocks
from specjax.types import Target

ROWS, VOCAB, WIDTH = (2, 3), 130, 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 32 tokens: five of them, and the last one overlaps."""
    monkeypatch.setattr(by_blocks, "BLOCK_BYTES", 0)
    monkeypatch.setattr(by_blocks, "MIN_BLOCK", 32)


def best(logits: np.ndarray, k: int):
    """Return the result for logits [2, 3, V]. The table holds the ids, and its product is a look-up."""
    table = jnp.arange(VOCAB, dtype=jnp.float32)[:, None]
    look_up = lambda part: jnp.take(jnp.asarray(logits), part[:, 0].astype(jnp.int32), axis=-1)
    return jax.jit(lambda: best_by_blocks(look_up, table, ROWS, k))()


@pytest.mark.parametrize("kind", ["normal", "ties", "banned", "equal"])
def test_the_best_are_those_of_a_stable_sort(kind):
    x = np.random.default_rng(0).normal(size=(*ROWS, VOCAB)).astype(np.float32)
    x = {"normal": x, "ties": np.round(x), "banned": np.where(x < 1, -np.inf, x), "equal": np.zeros_like(x)}[kind]
    for k in (1, 8):
        ours = best(x, k)
        order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
        wanted = np.take_along_axis(x, order, -1)
        np.testing.assert_array_equal(ours.logits, wanted)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.asarray(ours.tokens)[finite], order[finite])
        np.testing.assert_allclose(ours.total, np.log(np.exp(x.astype(np.float64)).sum(-1)), atol=1e-5)


@pytest.mark.parametrize("place", [0, 40, VOCAB - 1])
def test_the_total_shows_a_logit_that_is_no_number(place):
    x = np.zeros((*ROWS, VOCAB), np.float32)
    x[0, 0, place], x[0, 1, place], x[0, 2] = np.nan, np.inf, -np.inf
    assert np.isfinite(best(x, 3).total).tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_has_the_best_of_its_own_logits(tied):
    """Gemma's form has a soft cap and a tied head."""
    if tied:
        config = Gemma3Config(
            vocab_size=VOCAB, width=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=32,
            logit_softcap=3.0,
        )  # fmt: skip
        target = Target(make_model(config), init_params(config, jax.random.key(1)))
    else:
        target = tiny_llama(vocab=VOCAB)
    hidden = jax.random.normal(jax.random.key(0), (*ROWS, 32))
    logits = target.model.unembed(target.params, hidden)
    ours = jax.jit(functools.partial(target.model.best, k=5))(target.params, hidden)
    scores, tokens = jax.lax.top_k(logits, 5)
    np.testing.assert_allclose(ours.logits, scores, atol=1e-5)
    np.testing.assert_array_equal(ours.tokens, tokens)
    np.testing.assert_allclose(ours.total, jax.nn.logsumexp(logits, -1), atol=1e-5)


def test_no_best_where_their_bits_or_devices_may_differ():
    config = dataclasses.replace(tiny_llama().model.config, dtype="bfloat16", same_bits=True)
    assert make_model(config).best is None
