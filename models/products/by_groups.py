"""Products with weights that have one scale per group of inputs, by a kernel on each device of a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specjax.numerics.quantized_array import QuantizedArray
from specjax.pallas_kernels.grouped_matmul import chunk_inputs, grouped_matmul, unsupported_reason
from specjax.types import Array

MAX_ROWS_WITH_REST = 64
"""Largest number of rows for which matrices with a rest of a chunk of inputs are multiplied by the kernel.

The kernel multiplies four copies of the rows for groups of 32. Products of 256 rows with 2,880 x 2,880 weights take at
least 130,000 cycles of a v5e chip in it, and 48,000 in XLA (libtpu 0.0.42).
"""


def multiply_groups(x: Array, weight: QuantizedArray) -> Array | None:
    """Multiply x [..., I] by the transpose of a weight [O, I]. Return float32[..., O], or None without a kernel for it.

    The compiler does not split a kernel over a mesh. There the weight needs the sharding of its values, and each device
    multiplies its part. Parts of the inputs are summed over the devices.
    """
    active = jax.sharding.get_abstract_mesh()
    is_whole = weight.sharding is None or weight.sharding.mesh.size == 1
    if active.manual_axes or (is_whole and active.size <= 1):  # arrays are those of one device
        return _multiply(x, weight.values, weight.scales, weight.offsets) if _is_supported(x, weight, 1) else None
    if is_whole:  # the part of each device is not defined
        return None
    outputs, inputs = _axes(weight.sharding)
    if not _is_supported(x, weight, _num_parts(weight.sharding, inputs)):
        return None
    rows = _row_axes(x, weight.sharding)

    def local(x: Array, values: Array, scales: Array, offsets: Array | None) -> Array:
        y = _multiply(x, values, scales, offsets)
        return y if inputs is None else jax.lax.psum(y, inputs)

    by_matrix = PartitionSpec(outputs, inputs)
    specs = PartitionSpec(*rows, inputs), by_matrix, by_matrix, None if weight.offsets is None else by_matrix
    split = jax.shard_map(
        local, mesh=weight.sharding.mesh, in_specs=specs, out_specs=PartitionSpec(*rows, outputs), check_vma=False
    )
    return split(x, weight.values, weight.scales, weight.offsets)


def _multiply(x: Array, values: Array, scales: Array, offsets: Array | None) -> Array:
    y = grouped_matmul(x.reshape(-1, x.shape[-1]), values, scales).reshape(*x.shape[:-1], -1)
    return y if offsets is None else y - products_of_offsets(x, offsets)


def products_of_offsets(x: Array, offsets: Array) -> Array:
    """Return float32[..., O], the products of x [..., I] and the offsets [O, G] of its groups."""
    sums = jnp.sum(x.astype(jnp.float32).reshape(*x.shape[:-1], offsets.shape[-1], -1), -1)
    return jnp.matmul(sums, offsets.T, precision=jax.lax.Precision.HIGHEST)


def _is_supported(x: Array, weight: QuantizedArray, parts: int) -> bool:
    """Return True if the kernel multiplies x [..., I] by each of so many parts of the inputs."""
    inputs, groups = weight.shape[-1], weight.scales.shape[-1]
    return groups % parts == 0 and has_kernel(inputs // parts, groups // parts, x.size // x.shape[-1])


def has_kernel(inputs: int, groups: int, rows: int) -> bool:
    """Return True if the kernel multiplies so many rows by a matrix with so many inputs and groups.

    Matrices whose inputs do not fill whole chunks have it for few rows only.
    """
    is_whole = inputs % chunk_inputs(inputs // groups) == 0
    return unsupported_reason(inputs, groups) is None and (is_whole or rows <= MAX_ROWS_WITH_REST)


def _axes(sharding: NamedSharding) -> tuple[Any, Any]:
    """Return the mesh axes that split the outputs and the inputs of a matrix; None: none."""
    spec = (None, None, *sharding.spec)
    return spec[-2], spec[-1]


def _num_parts(sharding: NamedSharding, axes: Any) -> int:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(sharding.mesh.shape[name] for name in names)


def _row_axes(x: Array, sharding: NamedSharding) -> tuple[str | None, ...]:
    """Return the mesh axes of the leading dimensions of x [..., I], whose first one is the batch."""
    if x.ndim == 1:
        return ()
    count = sharding.mesh.shape.get("data", 1)
    return ("data" if count > 1 and x.shape[0] % count == 0 else None, *[None] * (x.ndim - 2))
