"""Systems with a unit lower triangular matrix, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import platforms
from specjax.numerics.triangular import solve_unit_lower, unit_lower_inverse


def test_inverse_of_triangular_matrices():
    """Equal keys and full writes give ones below the diagonal, where a sum of powers loses all digits."""
    rng = np.random.default_rng(0)
    invert = jax.jit(unit_lower_inverse)
    for size in (1, 2, 7, 64):
        for a in (np.tril(np.ones((size, size)), -1), np.tril(rng.normal(size=(size, size)), -1) / size**0.5):
            inverse = np.asarray(invert(jnp.asarray(a[None], jnp.float32)))[0]
            np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(size) + a), atol=2e-5)


def test_long_systems_are_solved_by_blocks():
    rng = np.random.default_rng(0)
    a, right = np.tril(rng.normal(size=(2, 150, 150)), -1) / 12, rng.normal(size=(2, 150, 3))
    x = jax.jit(solve_unit_lower)(jnp.asarray(a, jnp.float32), jnp.asarray(right, jnp.float32))
    np.testing.assert_allclose(x, np.linalg.solve(np.eye(150) + a, right), rtol=1e-3, atol=1e-4)


def test_the_library_of_gpus_solves_the_same_systems(monkeypatch):
    """The call is the same on a CPU, which substitutes in LAPACK."""
    rng = np.random.default_rng(0)
    a, right = np.tril(rng.normal(size=(2, 3, 16, 16)), -1) / 4, rng.normal(size=(2, 3, 16, 5))
    matrix = jnp.asarray(a, jnp.float32)
    by_products = jax.jit(solve_unit_lower)(matrix, jnp.asarray(right, jnp.float32))
    monkeypatch.setattr(platforms, "of_program", lambda: "gpu")
    lowered = jax.jit(lambda a, b: solve_unit_lower(a, b)).lower(matrix, jnp.asarray(right, jnp.float32))
    assert "triangular" in lowered.as_text() or "trsm" in lowered.as_text()
    x = lowered.compile()(matrix, jnp.asarray(right, jnp.float32))
    np.testing.assert_allclose(x, np.linalg.solve(np.eye(16) + a, right), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(x, by_products, rtol=1e-4, atol=1e-5)
