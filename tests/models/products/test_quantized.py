"""Products with quantised matrices, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.products import matmul, matmul_same_bits, take_rows
from specjax.models.products import quantized as products
from specjax.numerics.quantized_array import FLOAT8, QuantizedArray, WeightFormat, expand_rows, quantize_rows
from specjax.pallas_kernels.grouped_matmul import unsupported_reason

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((24, 96)).astype(np.float32)
X = RANDOM.standard_normal((5, 96)).astype(np.float32)
ON_CPU_AND_ELSEWHERE = pytest.mark.parametrize("platform", ["cpu", "default"])


def make(form: WeightFormat) -> QuantizedArray:
    matrix = quantize_rows(WEIGHT, form)
    if form.has_offsets:
        offsets = RANDOM.standard_normal(matrix.scales.shape).astype(np.float32)
        matrix = QuantizedArray(matrix.values, matrix.scales, offsets, form.inputs)
    return jax.tree.map(jnp.asarray, matrix)


def rounded_inputs(x):
    """Round rows to whole multiples of 1/127 of their largest magnitude."""
    scale = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    return np.rint(x / scale).astype(np.int64), scale.astype(np.float64)


def jit_anew(function):
    """Jit a function so that no program of an earlier test is used, which may be that of another backend."""
    return jax.jit(lambda *args: function(*args))


@pytest.fixture
def platform_form(platform, monkeypatch):
    """Use the products of other backends on this one, in programs of `jit_anew`."""
    if platform == "default":
        choose = lambda *args, default, **_: default(*args)
        monkeypatch.setattr(jax.lax, "platform_dependent", choose)


@ON_CPU_AND_ELSEWHERE
@pytest.mark.parametrize("has_offsets", [False, True])
def test_int8_products_sum_whole_numbers(platform_form, has_offsets):
    matrix = make(WeightFormat(inputs="int8", has_offsets=has_offsets))
    values, scale = rounded_inputs(X)
    expected = (values @ np.asarray(matrix.values, np.int64).T) * scale * np.asarray(matrix.scales, np.float64)[:, 0]
    if has_offsets:
        expected -= values.sum(-1, keepdims=True) * scale * np.asarray(matrix.offsets, np.float64)[:, 0]
    np.testing.assert_allclose(jit_anew(matmul)(X, matrix), expected, rtol=1e-5, atol=1e-5)


@ON_CPU_AND_ELSEWHERE
@pytest.mark.parametrize("form", [
    WeightFormat(),
    WeightFormat(values=FLOAT8),
    WeightFormat(bits=4, group=32, has_offsets=True),
    WeightFormat(bits=4, group=32, inputs="int8"),
], ids=str)  # fmt: skip
def test_other_products_are_those_of_the_expanded_matrix(platform_form, form):
    matrix = make(form)
    rows = X if form.inputs is None else np.float32(np.prod(np.broadcast_arrays(*rounded_inputs(X)), 0))
    expected = rows.astype(np.float64) @ np.asarray(expand_rows(matrix), np.float64).T
    np.testing.assert_allclose(jit_anew(matmul)(X, matrix), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_row_has_the_same_bits_beside_any_other_rows(dtype):
    """The largest values make sums of float32 inexact, so that a product in float32 would fail here."""
    matrix = make(WeightFormat(inputs="int8"))
    wide = QuantizedArray(jnp.tile(matrix.values, (1, 40)), matrix.scales, inputs="int8", dtype_name=dtype)
    x = jnp.tile(jnp.asarray(X, dtype), (8, 40))[:33]
    product = jax.jit(lambda x: matmul_same_bits(x, wide, jnp.float32) + 0.1)
    every = product(x)
    for count in (1, 2, 7, 16):
        np.testing.assert_array_equal(product(x[:count]), every[:count])


def test_blocks_divide_the_rows_of_a_matrix(monkeypatch):
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 500)
    assert products._num_blocks(24, 96) == 6 and products._num_blocks(7, 96) == 7
    matrix = make(WeightFormat(group=32))
    expected = X.astype(np.float64) @ np.asarray(expand_rows(matrix), np.float64).T
    np.testing.assert_allclose(jax.jit(matmul)(X[:1], matrix), expected[:1], rtol=1e-4, atol=1e-4)


@ON_CPU_AND_ELSEWHERE
@pytest.mark.parametrize("form", [
    WeightFormat(), WeightFormat(inputs="int8"), WeightFormat(group=32, has_offsets=True),
], ids=str)  # fmt: skip
def test_derivatives_pass_the_rounding_of_activations(platform_form, form, monkeypatch):
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 500)
    matrix = make(form)
    loss = lambda x, matrix: jnp.sum(matmul(x, matrix) * jnp.arange(24.0))
    expected = np.broadcast_to(np.arange(24.0) @ np.asarray(expand_rows(matrix)), X.shape)
    derivatives = jax.jit(lambda *args: [f(*args) for f in (
        jax.grad(loss), jax.vmap(jax.grad(loss), (0, None)), jax.jacfwd(lambda x, matrix: loss(x[:1], matrix)),
    )])  # fmt: skip
    gradient, by_row, forward = derivatives(X, matrix)
    for actual in (gradient, by_row):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(forward[:1], expected[:1], rtol=1e-4, atol=1e-4)


def test_derivatives_store_no_expanded_weight(monkeypatch):
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 500)
    matrix = make(WeightFormat(group=32))
    residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: matmul(x, matrix), x)[1], X)
    assert not [leaf for leaf in jax.tree.leaves(residuals) if leaf.dtype != jnp.int8 and leaf.size >= matrix.size]


def test_compiled_gradients_pass_a_matrix_that_a_kernel_multiplies_on_tpus():
    """JAX transposes the forms of all backends when it compiles a gradient, and it cannot transpose the kernel."""
    matrix = quantize_rows(jnp.asarray(np.tile(WEIGHT, (1, 8))), WeightFormat(bits=4, group=128))
    assert unsupported_reason(768, 6) is None
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(matmul(x, matrix) * jnp.arange(24.0))))
    expected = np.broadcast_to(np.arange(24.0) @ np.asarray(expand_rows(matrix), np.float64), (2, 3, 768))
    np.testing.assert_allclose(gradient(jnp.ones((2, 3, 768))), expected, rtol=1e-4, atol=1e-3)


def test_rows_of_a_table_are_expanded():
    table = make(WeightFormat(group=32, has_offsets=True))
    ids = jnp.array([[3, 3, 0]])
    np.testing.assert_array_equal(jax.jit(take_rows)(table, ids), expand_rows(table)[ids])


def test_expansions_depend_on_the_rows():
    """XLA moves one that does not depend on them out of the loop of a decode, if its optimisations are on."""
    program = jax.jit(matmul).lower(X, make(WeightFormat(group=32))).as_text()
    assert any("24x96xi8" in line for line in program.splitlines() if "optimization_barrier" in line)
