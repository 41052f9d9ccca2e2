"""Products with weights that have one scale per group of inputs: a Mosaic kernel that scales sums, not weights.

The sum of a group is multiplied by its scale, so a scale costs one multiplication per row of activations. XLA expands
the weights in memory first. A step of Llama 3 8B with int4 weights on a v6e chip takes 129 ms that way, by the
compiler's schedule (libtpu 0.0.42).

The matrix unit sums 128 inputs at a time. For smaller groups the rows are repeated, each copy with the inputs of one
group and zeros elsewhere.
"""

from __future__ import annotations

import functools
import math

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


def unsupported_reason(inputs: int, groups: int) -> str | None:
    """Return the reason why the kernel does not support a matrix of this many inputs and groups, or None."""
    if inputs % _chunk(inputs // groups):
        return f"takes multiples of {_chunk(inputs // groups)} inputs, not {inputs}"
    return None


@with_standard_modes  # Mosaic's indices are 32 bits
def grouped_matmul(x: jax.Array, values: jax.Array, scales: jax.Array, *, interpret=False) -> jax.Array:
    """Return float32[R, O], the products of x [R, I] and the scaled values [O, I] with scales float32[O, G]."""
    return _grouped_matmul(x, values, scales, interpret)


@functools.partial(jax.jit, static_argnums=3, inline=True)
def _grouped_matmul(x, values, scales, interpret):
    (rows, inputs), (outputs, groups) = x.shape, scales.shape
    group = inputs // groups
    chunk = _chunk(group)
    copies = chunk // group
    sublanes = 32 // x.dtype.itemsize
    block_rows = min(-(-rows // sublanes) * sublanes, max(BLOCK_ROWS // copies, sublanes))
    block_outputs = _block_outputs(outputs, inputs)
    x = jnp.pad(x, ((0, -rows % block_rows), (0, 0)))
    kernel = functools.partial(_kernel, chunk=chunk, copies=copies)
    y = pl.pallas_call(
        kernel,
        grid=(len(x) // block_rows, pl.cdiv(outputs, block_outputs)),
        in_specs=[
            pl.BlockSpec((copies, block_rows, inputs), lambda i, j: (0, i, 0)),
            pl.BlockSpec((block_outputs, inputs), lambda i, j: (j, 0)),
            pl.BlockSpec((groups, block_outputs), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((block_rows, block_outputs), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(_by_group(x, group, copies), values, scales.T)
    return y[:rows]


def _kernel(x_ref, values_ref, scales_ref, y_ref, *, chunk: int, copies: int):
    """Multiply a block: x [copies, R, I], values [O, I], scales [G, O] -> y [R, O]."""
    rows = y_ref.shape[0]
    is_exact = x_ref.dtype == jnp.bfloat16  # in one pass of the matrix unit
    precision = jax.lax.Precision.DEFAULT if is_exact else jax.lax.Precision.HIGHEST
    y_ref[...] = jnp.zeros_like(y_ref)

    def body(number, _):
        place = pl.ds(pl.multiple_of(number * chunk, chunk), chunk)
        x = x_ref[:, :, place].reshape(copies * rows, chunk)
        weights = values_ref[:, place].astype(x.dtype)
        sums = jax.lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision, preferred_element_type=jnp.float32)
        for copy in range(copies):
            scale = scales_ref[pl.ds(number * copies + copy, 1), :]
            y_ref[...] += sums[copy * rows : (copy + 1) * rows] * scale

    jax.lax.fori_loop(0, values_ref.shape[1] // chunk, body, None)


def _by_group(x: jax.Array, group: int, copies: int) -> jax.Array:
    """Return copies [copies, R, I] of rows, each with the inputs of one group of a chunk."""
    if copies == 1:
        return x[None]
    owner = jnp.arange(x.shape[1]) // group % copies
    return jnp.where(owner == jnp.arange(copies)[:, None, None], x, jnp.zeros((), x.dtype))


def _chunk(group: int) -> int:
    """Return the number of inputs that the kernel sums at a time."""
    return group if group % LANES == 0 else math.lcm(group, LANES)


def _block_outputs(outputs: int, inputs: int) -> int:
    """Return the number of rows of a block of weights."""
    size = max(LANES, BLOCK_BYTES // inputs // LANES * LANES)
    return min(size, outputs)
