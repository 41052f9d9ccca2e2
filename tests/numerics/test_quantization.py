"""Int8 with a scale per vector: the error bound, and what the bound does not cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.numerics.quantization import LEVELS, dequantize, quantize


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), size=st.floats(-30, 30), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_every_element_is_within_half_a_step(seed, size, dtype):
    x = jnp.asarray(np.random.default_rng(seed).standard_t(2, (5, 3, 16)) * 2.0**size, dtype)
    quantized = quantize(x)
    assert (
        quantized.values.dtype == jnp.int8 and quantized.scale.dtype == jnp.float32 and quantized.scale.shape == (5, 3)
    )
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    error = np.abs(np.asarray(dequantize(quantized), np.float64) - x)
    assert (error <= largest / LEVELS / 2 * (1 + 1e-5)).all()
    assert (np.abs(np.asarray(quantized.values, int)).max(-1) == LEVELS).all()  # a wider step would waste levels
    at_largest = np.abs(x) == largest
    np.testing.assert_allclose(error[at_largest], 0, atol=largest.max() * 1e-6)


def test_by_hand():
    quantized = quantize(jnp.array([[1.27, -0.636, 0.004, 0.006], [0, 0, 0, 0]]))
    assert quantized.values.tolist() == [[127, -64, 0, 1], [0, 0, 0, 0]]
    np.testing.assert_allclose(quantized.scale, [0.01, 0], rtol=1e-6)
    assert dequantize(quantized)[1].tolist() == [0, 0, 0, 0]


def test_it_stands_for_an_array():
    x = quantize(jax.random.normal(jax.random.key(0), (4, 3, 8)))
    assert (x.shape, x.ndim, len(x), x.dtype) == ((4, 3, 8), 3, 4, jnp.int8)
    np.testing.assert_array_equal(dequantize(x[1]), dequantize(x)[1])
    np.testing.assert_array_equal(dequantize(x[1:3]), dequantize(x)[1:3])
    assert len(jax.tree.leaves(x)) == 2


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_bound_is_one_that_can_fail(factor):
    x = jax.random.normal(jax.random.key(0), (100, 16))
    quantized = quantize(x)
    wrong = np.clip(np.round(x / quantized.scale[:, None] / factor), -127, 127) * quantized.scale[:, None] * factor
    assert (np.abs(wrong - x) > quantized.scale[:, None] / 2 * (1 + 1e-5)).any()
