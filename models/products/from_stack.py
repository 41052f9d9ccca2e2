"""Products with one of many quantised matrices, which a kernel reads where they are.

XLA copies a quantised matrix out of its array before a product. An expert of gpt-oss-20b in MXFP4 takes 377,000 cycles
of a v5e chip for each of its matrices, of which copies are 85 % (libtpu 0.0.42).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.products.by_groups import has_kernel, products_of_offsets
from specjax.models.products.quantized import scale_sums
from specjax.models.products.transposed import is_stored_by_columns
from specjax.numerics.quantization import quantize
from specjax.numerics.quantized_array import QuantizedArray
from specjax.pallas_kernels.grouped_matmul import grouped_matmul_of, too_wide_reason
from specjax.types import Array


@dataclass(frozen=True)
class QuantizedStack:
    """Quantised matrices [E, O, I], of which a kernel reads one."""

    matrices: QuantizedArray
    scales: Array | None  # float32[E, G, O] of several groups

    def at(self, number: Array) -> QuantizedMember:
        """Return matrix `number`."""
        return QuantizedMember(self, number)


@dataclass(frozen=True)
class QuantizedMember:
    """A matrix [O, I] of a stack."""

    stack: QuantizedStack
    number: Array  # int32[]

    def product(self, x: Array, dtype: Any = None) -> Array:
        """Return the product [R, O] of rows [R, I] and the matrix in `dtype`, by default that of x."""
        return self._product(x).astype(dtype or x.dtype)

    def _product(self, x: Array) -> Array:
        matrices, number = self.stack.matrices, self.number
        slice_of = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
        offsets = None if matrices.offsets is None else slice_of(matrices.offsets)
        if self.stack.scales is not None:
            y = grouped_matmul_of(x, matrices.values, self.stack.scales, number)
            return y if offsets is None else y - products_of_offsets(x, offsets)
        scales = slice_of(matrices.scales)[:, 0]
        if matrices.inputs is None:
            y = grouped_matmul_of(x, matrices.values, None, number) * scales
            return y if offsets is None else y - products_of_offsets(x, offsets)
        rows = quantize(x)
        total = grouped_matmul_of(rows.values, matrices.values, None, number)
        return scale_sums(total, rows, scales, None if offsets is None else offsets[:, 0])


def stack_of(matrices: QuantizedArray, rows: int) -> QuantizedStack | None:
    """Return the form that the kernel reads, for matrices [E, O, I] of one device and products with so many rows.

    Return None if it reads none, or if XLA is faster. The kernel reads whole numbers, and no array that
    a TPU stores by columns, which would be copied before it. The scales of groups are transposed here, once for all
    products.
    """
    active = jax.sharding.get_abstract_mesh()
    is_of_device = active.manual_axes or active.size <= 1
    has_sharding = matrices.sharding is not None and matrices.sharding.mesh.size > 1
    groups, is_whole = matrices.scales.shape[-1], jnp.issubdtype(matrices.values.dtype, jnp.integer)
    if has_sharding or not is_of_device or not is_whole or is_stored_by_columns(matrices.shape):
        return None
    if groups == 1:
        can_round = matrices.inputs is None or (matrices.inputs, matrices.values.dtype) == ("int8", jnp.int8)
        is_supported = can_round and too_wide_reason(matrices.shape[-1], 1) is None
        return QuantizedStack(matrices, None) if is_supported else None
    if matrices.inputs is not None or not has_kernel(matrices.shape[-1], groups, rows):
        return None
    return QuantizedStack(matrices, jnp.swapaxes(matrices.scales, 1, 2))
