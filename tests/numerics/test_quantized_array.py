"""Quantised matrices, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.numerics.quantized_array import FLOAT8, QuantizedArray, WeightFormat, expand_rows, quantize_rows

FORMATS = {
    "int8": (WeightFormat(), 127, 0.5),
    "int4 in groups": (WeightFormat(bits=4, values="int4", group=16), 7, 0.5),
    "float8": (WeightFormat(values=FLOAT8), 448, 16),  # half a unit of the last place, of values from 256 to 448
}
ROWS = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_off_by_at_most_half_a_step(name):
    form, largest, half_step = FORMATS[name]
    rows = ROWS.copy()
    rows[2] = 0
    matrix = quantize_rows(rows, form)
    grouped = rows.astype(np.float64).reshape(6, form.num_groups(64), -1)
    step = np.abs(grouped).max(-1, keepdims=True) / largest
    error = np.abs(expand_rows(matrix).reshape(grouped.shape) - grouped)
    assert np.all(error <= half_step * step * (1 + 1e-5)) and np.any(error > 0.8 * half_step * step)
    assert matrix.scales.shape == (6, form.num_groups(64)) and not np.any(expand_rows(matrix)[2])
    on_device = quantize_rows(jnp.asarray(rows), form)
    np.testing.assert_allclose(on_device.expand(), expand_rows(matrix), rtol=1e-6)


def test_it_has_the_shape_and_dtype_of_its_matrix_and_indexes_rows():
    form = WeightFormat(group=16, has_offsets=True)
    shapes = form.shapes((3, 6, 64), "bfloat16")
    assert (shapes.shape, shapes.ndim, shapes.dtype, shapes.size) == ((3, 6, 64), 3, jnp.bfloat16, 3 * 6 * 64)
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [(3, 6, 64), (3, 6, 4), (3, 6, 4)]
    matrix = quantize_rows(jnp.asarray(ROWS), form)
    np.testing.assert_array_equal(matrix[1:3].expand(), matrix.expand()[1:3])
    assert matrix[...] is matrix and len(matrix) == 6


def test_an_offset_is_subtracted_from_each_group():
    values = np.arange(8, dtype=np.int8).reshape(1, 8)
    matrix = QuantizedArray(values, np.float32([[0.5, 2]]), np.float32([[1, -3]]))
    np.testing.assert_array_equal(expand_rows(matrix), [[-1, -0.5, 0, 0.5, 11, 13, 15, 17]])
