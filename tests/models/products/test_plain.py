"""Matmuls and row lookups in the forms for CPUs are correct."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arrays import modes
from specjax.models.products import matmul, plain, take_rows


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17, 26, 32, 33])
def test_rows_that_are_taken_along_are_not_in_the_result(rows):
    x, weight = (
        np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in ((0, (rows, 24)), (1, (40, 24)))
    )
    actual = matmul(jnp.asarray(x), jnp.asarray(weight))
    assert actual.shape == (rows, 40)
    np.testing.assert_allclose(actual, x.astype(np.float64) @ weight.T.astype(np.float64), rtol=2e-5, atol=2e-5)


def in_a_loop(table, ids):
    """Sum rows that are looked up one after another, as in a drafter."""
    return jax.lax.fori_loop(0, len(ids), lambda i, total: total + take_rows(table, ids[i]), jnp.zeros_like(table[0]))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA on CPU")
def test_a_table_in_bfloat16_is_not_made_anew_in_float32():
    table, ids = jax.ShapeDtypeStruct((517, 48), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(in_a_loop).lower(table, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 517 * 48


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_their_derivatives(dtype):
    table, ids = jnp.arange(12.0, dtype=dtype).reshape(4, 3), jnp.asarray([[2, 0], [2, 3]])
    np.testing.assert_array_equal(take_rows(table, ids), table[ids])
    gradient = jax.grad(lambda table: jnp.sum(take_rows(table, ids) * jnp.asarray([1, 2, 4], dtype)))(table)
    np.testing.assert_array_equal(gradient, np.outer([1, 0, 2, 1], [1, 2, 4]))
    np.testing.assert_array_equal(jax.vmap(take_rows, (None, 0))(table, ids), table[ids])
    moved = jax.jvp(lambda table: take_rows(table, ids), (table,), (table,))[1]
    np.testing.assert_array_equal(moved, table[ids])


@pytest.mark.parametrize(
    ("width", "count", "is_product"), [(576, 4, True), (576, 1, False), (576, 65, False), (640, 4, False)]
)
def test_tpus_take_few_rows_of_a_narrow_table_by_a_product(width, count, is_product):
    """A TPU stores such a table by columns, and a lookup would copy it."""
    shapes = jax.ShapeDtypeStruct((517, width), jnp.bfloat16), jax.ShapeDtypeStruct((1, count), jnp.int32)
    text = modes.jit(take_rows).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert ("dot_general" in text) is is_product and ("gather" in text) is not is_product


def test_rows_by_a_product_are_exact():
    table = jax.random.normal(jax.random.key(0), (517, 48), jnp.bfloat16)
    ids = jnp.asarray([[0, 516, 7], [7, 300, 600]])  # as in a lookup, an id past the end means the last row
    np.testing.assert_array_equal(plain._take_by_product(table, ids), table[jnp.minimum(ids, 516)])


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "DEFAULT"), ("float32", "HIGHEST")])
def test_only_products_of_float32_have_the_highest_precision(dtype, precision):
    """The CUDA compiler calls no matmul kernel for one row of bfloat16 with the highest precision."""
    shapes = jax.ShapeDtypeStruct((1, 8), dtype), jax.ShapeDtypeStruct((16, 8), dtype)
    text = modes.jit(matmul).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert f"precision = [{precision}, {precision}]" in text
