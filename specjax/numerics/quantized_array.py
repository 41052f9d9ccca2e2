"""Matrices that are stored in few bits, with one scale per group of inputs: weight = values * scale - offset.

The form covers rounding to whole numbers with and without zero points, and float8. Offsets are products of scale and
zero point, which float32 represents exactly for the formats that are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array

FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class WeightFormat:
    """The storage format of a quantised matrix [O, I].

    Attributes:
      bits: bits per value that the format has; `values` may use a wider dtype.
      values: dtype of the stored values: "int8", "int4", "uint4", "float8_e4m3fn" or "float8_e5m2".
      group: number of inputs that share a scale; None: all inputs of a row.
      has_offsets: each group has an offset besides its scale.
      inputs: dtype to which rows of the other factor are rounded before a product, "int8" with a scale per row or
        "float8_e4m3fn" with a scale per row and group; None: they are not rounded.
    """

    bits: int = 8
    values: str = "int8"
    group: int | None = None
    has_offsets: bool = False
    inputs: str | None = None

    def num_groups(self, inputs: int) -> int:
        """Return the number of groups of a row of `inputs` numbers."""
        return 1 if self.group is None else inputs // self.group

    def has_values_of(self, other: WeightFormat) -> bool:
        """Return True if the two formats have equal values and scales, and may differ in the dtype that stores them."""
        return (self.bits, self.group, self.has_offsets) == (other.bits, other.group, other.has_offsets)

    def shapes(self, shape: tuple[int, ...], dtype: str) -> QuantizedArray:
        """Return the shapes and dtypes of a matrix [..., O, I] in this format, which stands for one of `dtype`."""
        scales = jax.ShapeDtypeStruct((*shape[:-1], self.num_groups(shape[-1])), jnp.float32)
        values = jax.ShapeDtypeStruct(shape, jnp.dtype(self.values))
        return QuantizedArray(values, scales, scales if self.has_offsets else None, self.inputs, dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """A matrix [..., O, I] in few bits. As a pytree, its leaves are the stored arrays.

    Its shape, length and dtype are those of the matrix that it stands for. Indices select leading axes.
    """

    values: Any  # int8, int4, uint4 or float8[..., O, I]
    scales: Any  # float32[..., O, G], of G groups of I / G inputs
    offsets: Any = None  # float32[..., O, G]
    inputs: str | None = field(default=None, metadata={"static": True})  # see `WeightFormat.inputs`
    dtype_name: str = field(default="float32", metadata={"static": True})
    sharding: Any = field(default=None, metadata={"static": True})  # of the values in a pass over a mesh, see `Layout`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self):
        return jnp.dtype(self.dtype_name)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index) -> QuantizedArray:
        return self if index is Ellipsis else jax.tree.map(lambda leaf: leaf[index], self)

    def expand(self, dtype: Any = None) -> Array:
        """Return the matrix in `dtype`, by default its own. The arithmetic is that of float32."""
        return expand_rows(self).astype(dtype or self.dtype)


def expand_rows(matrix: QuantizedArray) -> Any:
    """Return a matrix [..., O, I] as float32. Arrays of NumPy stay arrays of NumPy."""
    grouped = (*matrix.scales.shape, matrix.shape[-1] // matrix.scales.shape[-1])
    weights = matrix.values.astype(jnp.float32).reshape(grouped) * matrix.scales[..., None]
    weights = weights if matrix.offsets is None else weights - matrix.offsets[..., None]
    return weights.reshape(matrix.shape)


def quantize_rows(rows: Any, form: WeightFormat) -> QuantizedArray:
    """Round rows float32[..., O, I] to a symmetric format. A group's largest magnitude gets the largest value.

    Arrays of NumPy stay arrays of NumPy. Zero groups have the scale 0. The `dtype_name` of the result is "float32".
    """
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    limit = _largest_value(form)
    grouped = rows.reshape(*rows.shape[:-1], form.num_groups(rows.shape[-1]), -1)
    scales = xp.abs(grouped).max(-1) / xp.float32(limit)
    values = grouped / xp.where(scales > 0, scales, xp.float32(1))[..., None]
    values = xp.clip(values if form.values == FLOAT8 else xp.rint(values), -limit, limit)
    return QuantizedArray(values.astype(jnp.dtype(form.values)).reshape(rows.shape), scales, inputs=form.inputs)


def _largest_value(form: WeightFormat) -> float:
    return float(jnp.finfo(FLOAT8).max) if form.values == FLOAT8 else 2 ** (form.bits - 1) - 1


def is_quantized(leaf: Any) -> bool:
    """Return True for a `QuantizedArray`. It is for the argument `is_leaf` of `jax.tree` functions."""
    return isinstance(leaf, QuantizedArray)


def as_float_weights(tree: Any) -> Any:
    """Return a tree with its quantised matrices expanded."""
    return jax.tree.map(lambda leaf: leaf.expand() if is_quantized(leaf) else leaf, tree, is_leaf=is_quantized)
