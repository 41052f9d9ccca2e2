"""Products with weights that have one scale per group of inputs: a Mosaic kernel that scales sums, not weights.

The sum of a group is multiplied by its scale, so a scale costs one multiplication per row of activations. XLA expands
the weights in memory first. A step of Llama 3 8B with int4 weights on a v6e chip takes 129 ms that way, by the
compiler's schedule (libtpu 0.0.42).

The matrix unit sums 128 inputs at a time. For smaller groups the rows are repeated, each copy with the inputs of one
group and zeros elsewhere.

The matrices of several experts are one operand, in which the kernel reads those of one expert. XLA would copy them out
of the array first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.arrays.modes import with_standard_modes

LANES = 128
BLOCK_BYTES = 1 << 21
"""Maximum size of a block of weights in on-chip memory, as int8."""
BLOCK_ROWS = 256
"""Maximum number of rows of activations of a block."""
VMEM_BYTES = 64 << 20
"""On-chip memory that the kernel may use."""


def unsupported_reason(inputs: int, groups: int) -> str | None:
    """Return the reason why the kernel does not support a matrix of this many inputs and groups, or None."""
    group = inputs // groups
    if group % LANES and LANES % group and inputs % chunk_inputs(group):
        return f"takes multiples of {chunk_inputs(group)} inputs in groups of {group}, not {inputs}"
    return None


@with_standard_modes  # Mosaic's indices are 32 bits
def grouped_matmul(x: jax.Array, values: jax.Array, scales: jax.Array, *, interpret=False) -> jax.Array:
    """Return float32[R, O], the products of x [R, I] and the scaled values [O, I] with scales float32[O, G]."""
    return _grouped_matmul(x, values[None], scales.T[None], jnp.zeros(1, jnp.int32), interpret)


@with_standard_modes
def grouped_matmul_of(
    x: jax.Array, values: jax.Array, scales: jax.Array | None, number: jax.Array, *, interpret=False
) -> jax.Array:
    """Return [R, O], the products of x [R, I] and matrix `number` of the scaled values [E, O, I].

    The result is float32, or int32 for x and values of int8 without scales.

    Args:
      scales: float32[E, G, O]. The scales of a group are adjacent, unlike those of `grouped_matmul`. None: the sums are
        not scaled.
      number: int32[].
    """
    return _grouped_matmul(x, values, scales, jnp.reshape(number, (1,)), interpret)


@functools.partial(jax.jit, static_argnums=4, inline=True)
def _grouped_matmul(x, values, scales, number, interpret):
    rows, (outputs, inputs) = len(x), values.shape[1:]
    groups = 1 if scales is None else scales.shape[1]
    group = inputs // groups
    chunk = inputs if groups == 1 else chunk_inputs(group)
    copies = 1 if groups == 1 else chunk // group
    sublanes = 32 // x.dtype.itemsize
    block_rows = min(-(-rows // sublanes) * sublanes, max(BLOCK_ROWS // copies, sublanes))
    block_outputs = _block_outputs(outputs, inputs)
    x = jnp.pad(x, ((0, -rows % block_rows), (0, 0)))
    row_blocks = len(x) // block_rows
    has_scales = [] if scales is None else [pl.BlockSpec((None, groups, block_outputs), lambda i, j, n: (n[0], 0, j))]
    dtype = jnp.int32 if scales is None and x.dtype == values.dtype == jnp.int8 else jnp.float32
    y = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, copies=copies),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(row_blocks, pl.cdiv(outputs, block_outputs)),
            in_specs=[
                pl.BlockSpec((copies, block_rows, inputs), lambda i, j, n: (0, i, 0)),
                pl.BlockSpec((None, block_outputs, inputs), lambda i, j, n: (n[0], j, 0)),
                *has_scales,
            ],
            out_specs=pl.BlockSpec((block_rows, block_outputs), lambda i, j, n: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * copies * len(x) * outputs * inputs,
            bytes_accessed=row_blocks * outputs * (inputs * _bits(values.dtype) // 8 + 4 * groups)
            + copies * x.nbytes
            + 4 * len(x) * outputs,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(number, _by_group(x, group, copies), values, *([] if scales is None else [scales]))
    return y[:rows]


def _kernel(_, x_ref, values_ref, *refs, chunk: int, copies: int):
    """Multiply a block: x [copies, R, I], values [O, I], possibly scales [G, O] -> y [R, O].

    The last chunk may have fewer groups.
    """
    *scales_ref, y_ref = refs
    rows, inputs = y_ref.shape[0], values_ref.shape[1]
    is_exact = x_ref.dtype in (jnp.bfloat16, jnp.int8)  # in one pass of the matrix unit
    precision = jax.lax.Precision.DEFAULT if is_exact else jax.lax.Precision.HIGHEST

    def products(start: Any, size: int, parts: int) -> jax.Array:
        place = pl.ds(start, size)
        x = x_ref[:parts, :, place].reshape(parts * rows, size)
        weights = values_ref[:, place].astype(x.dtype)
        return jax.lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision, preferred_element_type=y_ref.dtype)

    if not scales_ref:
        y_ref[...] = products(0, inputs, 1)
        return
    y_ref[...] = jnp.zeros_like(y_ref)

    def add(number: Any, start: Any, size: int, parts: int) -> None:
        sums = products(start, size, parts)
        for copy in range(parts):
            scale = scales_ref[0][pl.ds(number * copies + copy, 1), :]
            y_ref[...] += sums[copy * rows : (copy + 1) * rows] * scale

    chunks, tail = divmod(inputs, chunk)
    jax.lax.fori_loop(
        0, chunks, lambda number, _: add(number, pl.multiple_of(number * chunk, chunk), chunk, copies), None
    )
    if tail:
        add(chunks, chunks * chunk, tail, tail * copies // chunk)


def _bits(dtype: Any) -> int:
    """Return the bits of a stored value."""
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * jnp.dtype(dtype).itemsize


def _by_group(x: jax.Array, group: int, copies: int) -> jax.Array:
    """Return copies [copies, R, I] of rows, each with the inputs of one group of a chunk."""
    if copies == 1:
        return x[None]
    owner = jnp.arange(x.shape[1]) // group % copies
    return jnp.where(owner == jnp.arange(copies)[:, None, None], x, jnp.zeros((), x.dtype))


def chunk_inputs(group: int) -> int:
    """Return the number of inputs that the kernel sums at a time."""
    return group if group % LANES == 0 else math.lcm(group, LANES)


def _block_outputs(outputs: int, inputs: int) -> int:
    """Return the number of rows of a block of weights."""
    size = max(LANES, BLOCK_BYTES // inputs // LANES * LANES)
    return min(size, outputs)
