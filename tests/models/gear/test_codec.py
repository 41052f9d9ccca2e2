"""Compression of blocks against float64 NumPy written from the card, and its oracles."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.gear.codec import GearForm, compress, expand, group_size, low_rank

RNG = np.random.default_rng(0)
SPREAD = RNG.normal(size=(3, 2, 64, 32)) * RNG.lognormal(size=(3, 2, 1, 32)) + RNG.normal(size=(3, 2, 1, 32))
"""Keys with channels of different sizes and means."""


def round_trip(x, form, over_tokens=True, numbers=jnp.float32):
    return np.asarray(expand(compress(jnp.asarray(x, jnp.float32), form, over_tokens, numbers), form, over_tokens))


def by_hand(x, form, over_tokens):
    """Return the reconstruction of x float64[n, h], and its codes [V, N]."""
    vectors = x.T if over_tokens else x
    restored, codes = np.zeros_like(vectors), np.zeros(vectors.shape, int)
    for i, vector in enumerate(vectors):
        count = form.num_outliers(len(vector))
        order = np.argsort(vector, kind="stable")
        ends = [*order[:count], *order[len(vector) - count :]]
        inner = vector.copy()
        inner[ends] = vector.mean()
        size = group_size(len(vector))
        for start in range(0, len(vector), size):
            part = slice(start, start + size)
            low, step = inner[part].min(), np.ptp(inner[part]) / (2**form.bits - 1)
            codes[i, part] = np.round((inner[part] - low) / step)
            restored[i, part] = low + step * codes[i, part]
        restored[i, ends] = vector[ends]
    restored = restored.T if over_tokens else restored
    if form.rank:
        error = x - restored
        left = np.linalg.qr(error @ np.linalg.matrix_power(error.T @ error, 2) @ start_of(x.shape[1], form))[0]
        restored = restored + left @ (left.T @ error)
    return restored, codes


def start_of(h, form):
    return np.random.default_rng(0).standard_normal((form.rank, h)).astype(np.float32).T.astype(np.float64)


def test_the_example_of_the_card():
    x = np.array([[0.0, 1, 2, 30]])
    form = GearForm(bits=2, block=4, rank=0, outliers=0.5)
    blocks = compress(jnp.asarray(x), form, False, jnp.float32)
    assert np.asarray(blocks.codes).tolist() == [[0b11_00_00_11]]
    assert np.isclose(float(blocks.step[0, 0]), 2.4167, atol=1e-4) and float(blocks.low[0, 0]) == 1
    assert sorted(np.asarray(blocks.outliers)[0].tolist()) == [0, 30]
    np.testing.assert_array_equal(round_trip(x, form, False), [[0, 1, 1, 30]])
    np.testing.assert_allclose(round_trip(x, form._replace(rank=1), False), x, atol=1e-6)


@pytest.mark.parametrize("over_tokens", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_against_numpy(bits, over_tokens):
    """A code that float32 rounds to the other side of a tie changes the correction, so its matrix is not compared."""
    num_equal = 0
    for x in SPREAD.reshape(-1, 64, 32):
        for form in (GearForm(bits, rank=0), GearForm(bits, rank=3), GearForm(bits, rank=2, outliers=0)):
            expected, codes = by_hand(x.astype(np.float32).astype(np.float64), form, over_tokens)
            stored = compress(jnp.asarray(x, jnp.float32), form, over_tokens, jnp.float32)
            packed = sum(codes[:, i :: 8 // bits] << (i * bits) for i in range(8 // bits))
            differs = np.asarray(stored.codes) != packed
            assert differs.mean() < 2e-3
            if not differs.any():
                np.testing.assert_allclose(round_trip(x, form, over_tokens), expected, atol=2e-4)
                num_equal += 1
    assert num_equal >= 12  # of 18


@pytest.mark.parametrize("over_tokens", [True, False])
def test_numbers_are_stored_as_float16(over_tokens):
    form = GearForm(4)
    stored = round_trip(SPREAD, form, over_tokens, jnp.float16)
    for ours, x in zip(stored.reshape(-1, 64, 32), SPREAD.reshape(-1, 64, 32), strict=True):
        expected, _ = by_hand(x, form, over_tokens)
        assert np.abs(ours - x).mean() < 1.05 * np.abs(expected - x).mean() + 1e-3
    large = round_trip(np.full((4, 8), 1e6), form, over_tokens, jnp.float16)
    assert np.isfinite(large).all()


def test_a_full_rank_and_a_full_share_are_exact():
    for over_tokens in (True, False):
        np.testing.assert_allclose(round_trip(SPREAD, GearForm(2, rank=32), over_tokens), SPREAD, atol=1e-4)
        everything = GearForm(2, rank=0, outliers=1.0)
        np.testing.assert_allclose(round_trip(SPREAD, everything, over_tokens), SPREAD, rtol=1e-6)


@pytest.mark.parametrize("over_tokens", [True, False])
def test_the_error_does_not_grow_with_bits_rank_and_outliers(over_tokens):
    error = lambda **changes: np.square(round_trip(SPREAD, GearForm(**changes), over_tokens) - SPREAD).sum()
    for name, values in (("bits", (2, 4, 8)), ("rank", (0, 1, 2, 4, 8)), ("outliers", (0.0, 0.04, 0.1, 0.5))):
        errors = [error(**{"bits": 2, "rank": 2, "outliers": 0.02} | {name: value}) for value in values]
        for earlier, later in itertools.pairwise(errors):
            assert later <= earlier * (1 + 1e-5), name


def test_the_correction_is_a_projection():
    error = jnp.asarray(SPREAD, jnp.float32)
    left, right = low_rank(error, 5)
    np.testing.assert_allclose(left.swapaxes(-1, -2) @ left, np.broadcast_to(np.eye(5), (3, 2, 5, 5)), atol=1e-5)
    inner = error - left @ right.swapaxes(-1, -2)
    np.testing.assert_allclose(left.swapaxes(-1, -2) @ inner, np.zeros((3, 2, 5, 32)), atol=2e-3)
    best = np.linalg.svd(SPREAD, compute_uv=False)[..., 5:]
    assert (np.square(np.asarray(inner)).sum((2, 3)) < 1.1 * np.square(best).sum(-1)).all()


def test_equal_numbers_and_zeros_are_finite():
    for x in (np.zeros((4, 8)), np.full((4, 8), 3.5)):
        for form in (GearForm(4, 4), GearForm(2, 4, outliers=0)):
            np.testing.assert_array_equal(round_trip(x, form, numbers=jnp.float16), x)
    assert jax.eval_shape(lambda x: compress(x, GearForm(2), True), jnp.zeros((2, 64, 16))).codes.shape == (2, 16, 16)
