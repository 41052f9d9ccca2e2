"""Products with matrices that a TPU stores by columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.products.padding import fill_tile
from specjax.types import Array

LANES = 128
"""Numbers in the last axis of a tile on a TPU."""


class TransposedMatrix(NamedTuple):
    """The transpose of a matrix [O, I], possibly with leading axes. Its only leaf is an array [..., I, O]."""

    columns: Array

    def product(self, x: Array, dtype: Any = None) -> Array:
        """Return the product [R, O] of rows [R, I] and the matrix in `dtype`, by default that of x."""
        is_exact = x.dtype == self.columns.dtype == jnp.bfloat16  # in one pass, as in products with rows
        precision = jax.lax.Precision.DEFAULT if is_exact else None
        dimensions = ((1,), (0,)), ((), ())
        y = jax.lax.dot_general(fill_tile(x), self.columns, dimensions, precision, preferred_element_type=dtype)
        return y[: len(x)]


def is_stored_by_columns(shape: tuple[int, ...]) -> bool:
    """Return True if a TPU stores an argument [..., O, I] by columns, because rows would take more padding."""
    outputs, inputs = shape[-2:]
    padded = lambda size: -(-size // LANES) * LANES
    return padded(inputs) * outputs > padded(outputs) * inputs


def by_columns(matrix: Array) -> TransposedMatrix:
    """Return the transpose of a matrix [..., O, I]. It is no copy if the matrix is stored by columns."""
    return TransposedMatrix(jnp.swapaxes(matrix, -1, -2))
