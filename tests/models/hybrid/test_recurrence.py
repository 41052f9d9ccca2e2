"""Linear recurrences over token trees, against recurrences in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.hybrid import recurrence as R


def test_inverse_of_triangular_matrices():
    """Equal keys and full writes give ones below the diagonal, where a sum of powers loses all digits."""
    rng = np.random.default_rng(0)
    invert = jax.jit(R.unit_lower_inverse)
    for size in (1, 7, 64):
        for a in (np.tril(np.ones((size, size)), -1), np.tril(rng.normal(size=(size, size)), -1) / size**0.5):
            inverse = np.asarray(invert(jnp.asarray(a[None], jnp.float32)))[0]
            np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(size) + a), atol=2e-5)


def test_long_systems_are_solved_by_blocks():
    rng = np.random.default_rng(0)
    a, right = np.tril(rng.normal(size=(2, 150, 150)), -1) / 12, rng.normal(size=(2, 150, 3))
    x = jax.jit(R.solve_unit_lower)(jnp.asarray(a, jnp.float32), jnp.asarray(right, jnp.float32))
    np.testing.assert_allclose(x, np.linalg.solve(np.eye(150) + a, right), rtol=1e-3, atol=1e-4)


def test_sums_of_strong_decays_keep_small_differences():
    """A sum of -4,000 in one float32 number has an error of 2e-4."""
    decay = np.concatenate([np.full(200, -20.3), np.full(60, -0.001)])[None, :, None]
    parts = np.cumsum(np.asarray(R.split_decay(jnp.asarray(decay, jnp.float32))), 1, dtype=np.float32)
    difference = np.sum(parts[:, -1] - parts[:, 200], -1)
    np.testing.assert_allclose(difference, -0.059, atol=2e-7)
    alone = np.cumsum(decay.astype(np.float32), 1, dtype=np.float32)
    assert abs(alone[0, -1, 0] - alone[0, 200, 0] + 0.059) > 1e-4
