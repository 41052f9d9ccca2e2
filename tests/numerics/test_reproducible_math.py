"""Arithmetic whose bits no program changes: near the real functions, and the same in any shape and surroundings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.numerics import reproducible_math

X = np.random.default_rng(0).normal(size=(64, 576)).astype(np.float32) * 4
BF16 = jnp.asarray(X, jnp.bfloat16)


def test_exponentials_are_near_and_scale_exactly():
    z = reproducible_math.fixed_point(jnp.asarray(X))
    got = np.asarray(reproducible_math.power_of_two(z))
    np.testing.assert_allclose(got, np.exp(X.astype(np.float64)), rtol=5e-5)
    for shift in (-3, 1, 40):
        np.testing.assert_array_equal(
            np.asarray(reproducible_math.power_of_two(z, shift)), got * np.float32(2.0**-shift)
        )
    far = reproducible_math.fixed_point(jnp.asarray([-jnp.inf, -1e30, -200.0, 200.0, 1e30]))
    assert np.asarray(reproducible_math.power_of_two(far)).tolist() == [0, 0, 0, np.inf, np.inf]
    np.testing.assert_array_equal(reproducible_math.sigmoid(jnp.asarray([-1e30, 0.0, 1e30])), [0, 0.5, 1])
    assert reproducible_math.power_of_two(jnp.int32(0)) == 1


def test_powers_of_two_end_in_zero_and_in_the_largest():
    n = jnp.array([-10_000, -127, -126, 0, 127, 10_000])
    np.testing.assert_array_equal(reproducible_math.two_to(n), np.float32([0, 0, 2.0**-126, 1, 2.0**127, 2.0**127]))


@pytest.mark.parametrize(
    ("ours", "real"),
    [
        (reproducible_math.silu, lambda x: x / (1 + np.exp(-x))),
        (reproducible_math.gelu, lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        (
            lambda x: reproducible_math.root_mean_square(x, 1e-5),
            lambda x: (np.mean(x**2, -1, keepdims=True) + 1e-5) ** -0.5,
        ),
    ],
)
def test_activations_and_norms_are_near_the_real_ones(ours, real):
    exact = real(np.asarray(BF16, np.float64))
    np.testing.assert_allclose(ours(BF16), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [8, 64, 575, 576])
def test_sums_do_not_depend_on_how_many_there_are(size):
    """XLA's own reduction does: it is the mutant. (Where a machine's does not, there is nothing to catch.)"""
    x = BF16[:, :size]
    run = lambda rows: np.asarray(
        jax.jit(lambda x: reproducible_math.sum_in_order(jnp.square(x.astype(jnp.float32))))(x[rows])
    )
    full = run(slice(0, 64))
    np.testing.assert_allclose(full, np.sum(np.asarray(x, np.float64) ** 2, -1), rtol=1e-5)
    for count in (1, 3, 7, 16):
        np.testing.assert_array_equal(run(slice(5, 5 + count)), full[5 : 5 + count])


def test_norms_do_not_depend_on_how_many_there_are():
    """The norm of a row has the same bits in any batch; with jax 0.12 the root next to the sum depended on whether the
    rows fill a vector."""
    x = jnp.asarray(3 * np.random.default_rng(1).normal(size=(64, 4, 576)), jnp.bfloat16)
    norm = lambda x: reproducible_math.as_bfloat16(x) * reproducible_math.root_mean_square(x, 1e-5)
    run = jax.jit(
        norm, compiler_options={"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    )
    full = np.asarray(run(x))
    for rows in (1, 2, 3, 5, 8, 9, 15, 33):
        np.testing.assert_array_equal(run(x[:rows]), full[:rows])


def test_derivatives_are_those_of_the_real_ones():
    """Integers have none: without a word of it that of the sigmoid would be zero, and SiLU's silently wrong."""
    x = jnp.asarray([-3.0, 0.0, 2.0], jnp.bfloat16)
    for ours, real in ((reproducible_math.silu, jax.nn.silu), (reproducible_math.gelu, jax.nn.gelu)):
        slope = lambda f: jax.grad(lambda x: jnp.sum(f(x.astype(jnp.float32))))(x.astype(jnp.float32))
        np.testing.assert_allclose(slope(ours), slope(real), atol=1e-2)


def test_products_with_bfloat16_are_exact():
    factor = np.asarray(reproducible_math.exact_factor(jnp.asarray(X)), np.float64)
    assert np.abs(factor / X - 1).max() < 2.0**-15
    product = np.asarray(BF16, np.float64) * factor
    np.testing.assert_array_equal(product.astype(np.float32), product)
