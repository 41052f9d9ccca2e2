"""Thresholds of top-k and top-p by the search of each platform, against a sort in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_logits import logits_of

from specjax.numerics import thresholds
from specjax.numerics.thresholds import CPU, GPU, TPU

SEARCHES = {"cpu": CPU, "tpu": TPU, "gpu": GPU}
ROWS, VOCAB = 24, 300


def top_k(x: np.ndarray, k: int) -> np.ndarray:
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, np.argsort(-x, axis=-1, kind="stable")[:, :k], True, -1)
    return mask


def top_p(x: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The nucleus of each row, and the distance of its mass from the threshold, below which rounding decides."""
    p = np.exp((x - x.max(-1, keepdims=True)).astype(np.float32)).astype(np.float64)
    order = np.argsort(-p, axis=-1, kind="stable")
    mass = np.cumsum(np.take_along_axis(p, order, -1), -1) / p.sum(-1, keepdims=True)
    mass_above = np.concatenate([np.zeros((len(x), 1)), mass[:, :-1]], -1)
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, order, mass_above < share, -1)
    return mask, np.abs(mass - share).min(-1)


@functools.cache
def masks(name: str):
    """Both masks as compiled functions of logits and settings."""
    search = SEARCHES[name]
    return (
        jax.jit(lambda x, k: thresholds._top_k_mask(search, x, k)),
        jax.jit(lambda x, p: thresholds._top_p_mask(search, x - jnp.max(x, -1, keepdims=True), p)),
    )


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "sharp", "banned"])
def test_every_search_selects_what_a_sort_selects(name, kind):
    x, (k_mask, p_mask) = logits_of(kind, ROWS, VOCAB), masks(name)
    for k in (1, 2, 7, 60):
        wanted = top_k(x, k)
        np.testing.assert_array_equal(np.asarray(k_mask(x, k)) | (x == -np.inf), wanted | (x == -np.inf))
    for share in (0.05, 0.5, 0.9, 0.999):
        wanted, distance = top_p(x, share)
        clear = distance > 1e-6
        assert clear.sum() > ROWS // 2 or kind in ("flat", "ties")
        np.testing.assert_array_equal(np.asarray(p_mask(x, jnp.float32(share)))[clear], wanted[clear])


def test_a_search_that_ends_too_early_is_caught(monkeypatch):
    loose = lambda x, p: thresholds._top_p_mask(TPU, x - jnp.max(x, -1, keepdims=True), p)
    x = logits_of("normal", ROWS, VOCAB)
    search = thresholds._largest
    early = lambda *some, **more: search(*some[:-1], lambda threshold: jnp.ones_like(threshold.above, bool), **more)
    monkeypatch.setattr(thresholds, "_largest", early)
    wanted, distance = top_p(x, 0.9)
    assert (np.asarray(loose(x, jnp.float32(0.9))) != wanted)[distance > 1e-6].any()


def test_a_search_ends_when_one_token_is_left():
    """Passes over the vocabulary: a few, where all bits of a float would take ten."""

    def passes(x, ends_early=True):
        count = 0

        def is_done(bounds):
            nonlocal count
            count += 1
            return (bounds.measure - bounds.above < 1.5 * thresholds._to_float(bounds.value)) & ends_early

        mass = lambda t: jnp.sum(jnp.where(x >= thresholds._to_float(t), x, 0.0), -1, keepdims=True)
        thresholds._largest(mass, 0.9 * mass(jnp.zeros((1, 1), jnp.uint32)), 1, 30, TPU, is_done)
        return count

    p = jnp.asarray(np.exp(np.random.default_rng(1).normal(size=(1, VOCAB)) * 3), jnp.float32)
    p /= p.max()
    with jax.disable_jit():
        assert passes(p) <= 6 < 10 == passes(p, ends_early=False)
