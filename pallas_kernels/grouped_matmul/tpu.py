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
from typing import Any, NamedTuple

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
"""On-chip memory that the kernel may use, on chips that have more."""
SMALLEST_VMEM = 16 << 20
"""On-chip memory of a core of v4, which has the least."""
MAX_CHUNK = 1024
"""Inputs of a matrix without groups that are summed at a time.

Products of int8 numbers are exact in bfloat16, and float32 has the exact sum of as many of them. The compiler needs
17 MiB of the 16 of v4 for 4,096 inputs and 256 rows at once.
"""
FREE_SHARE = 1 / 8
"""Share of the on-chip memory that blocks leave free, for values that the compiler spills."""


def unsupported_reason(inputs: int, groups: int) -> str | None:
    """Return the reason why the kernel does not support a matrix of this many inputs and groups, or None."""
    group = inputs // groups
    if group % LANES and LANES % group and inputs % chunk_inputs(group):
        return f"takes multiples of {chunk_inputs(group)} inputs in groups of {group}, not {inputs}"
    return too_wide_reason(inputs, groups)


def too_wide_reason(inputs: int, groups: int) -> str | None:
    """Return the reason why rows of this many inputs do not fit into on-chip memory, or None."""
    if BlockSizes(16, LANES, inputs, groups, 2, 8).bytes <= core_of_program().room:
        return None
    return f"takes matrices of which {LANES} rows fit into on-chip memory, not rows of {inputs} inputs"


class BlockSizes(NamedTuple):
    """The sizes of the blocks of a program."""

    rows: int  # of activations
    outputs: int  # rows of weights
    inputs: int
    groups: int
    item: int  # bytes of an activation
    bits: int  # of a weight

    @property
    def chunk(self) -> int:
        """Return the number of inputs that are summed at a time."""
        return min(self.inputs, MAX_CHUNK) if self.groups == 1 else chunk_inputs(self.inputs // self.groups)

    @property
    def copies(self) -> int:
        """Return the number of copies of the rows, one for each group of a chunk."""
        return 1 if self.groups == 1 else self.chunk // (self.inputs // self.groups)

    @property
    def bytes(self) -> int:
        """Return the on-chip memory of a program: each operand twice, and the values of a turn."""
        operands = self.copies * self.rows * self.inputs * self.item + self.outputs * self.inputs * self.bits // 8
        scales = 0 if self.groups == 1 else 4 * -(-self.groups // 8) * 8 * self.outputs
        weights = self.outputs * self.chunk * max(self.item, 2)  # in the dtype of the products
        results = 4 * self.rows * self.outputs
        return 2 * (operands + scales + results) + weights + self.copies * results


def fit_blocks(blocks: BlockSizes, room: int) -> BlockSizes:
    """Return the largest halves of blocks that fit into `room` bytes, fewer outputs first, or the smallest ones.

    More blocks of rows read the weights more often.
    """
    sublanes = 32 // blocks.item
    half = lambda size, unit: -(-size // (2 * unit)) * unit
    while blocks.bytes > room:
        if blocks.outputs > LANES:
            blocks = blocks._replace(outputs=half(blocks.outputs, LANES))
        elif blocks.rows > sublanes:
            blocks = blocks._replace(rows=half(blocks.rows, sublanes))
        else:
            break
    return blocks


class Core(NamedTuple):
    """The properties of a core that the kernel depends on."""

    vmem: int = SMALLEST_VMEM  # bytes of on-chip memory that the kernel may use
    multiplies_int8: bool = True  # v4 and tpu7x do not

    @property
    def room(self) -> int:
        """Return the on-chip memory that blocks may take."""
        return int(self.vmem * (1 - FREE_SHARE))


def core_of_program() -> Core:
    """Return the core for which a program is traced. Another device than a TPU, which interprets it, is the default."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return Core(SMALLEST_VMEM)
    return Core(min(info.vmem_capacity_bytes, VMEM_BYTES), info.int8_ops_per_second > 0)


@with_standard_modes  # Mosaic's indices are 32 bits
def grouped_matmul(x: jax.Array, values: jax.Array, scales: jax.Array, *, interpret=False) -> jax.Array:
    """Return float32[R, O], the products of x [R, I] and the scaled values [O, I] with scales float32[O, G]."""
    number = jnp.zeros(1, jnp.int32)
    return _grouped_matmul(x, values[None], scales.T[None], number, interpret, core_of_program())


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
    return _grouped_matmul(x, values, scales, jnp.reshape(number, (1,)), interpret, core_of_program())


@functools.partial(jax.jit, static_argnums=(4, 5), inline=True)
def _grouped_matmul(x, values, scales, number, interpret, core):
    rows, (outputs, inputs) = len(x), values.shape[1:]
    groups = 1 if scales is None else scales.shape[1]
    sublanes = 32 // x.dtype.itemsize
    largest = BlockSizes(0, _block_outputs(outputs, inputs), inputs, groups, x.dtype.itemsize, _bits(values.dtype))
    copies, chunk, group = largest.copies, largest.chunk, inputs // groups
    block_rows = min(-(-rows // sublanes) * sublanes, max(BLOCK_ROWS // copies, sublanes))
    block_rows, block_outputs, *_ = fit_blocks(largest._replace(rows=block_rows), core.room)
    x = jnp.pad(x, ((0, -rows % block_rows), (0, 0)))
    row_blocks = len(x) // block_rows
    has_scales = [] if scales is None else [pl.BlockSpec((None, groups, block_outputs), lambda i, j, n: (n[0], 0, j))]
    is_whole = scales is None and x.dtype == values.dtype == jnp.int8
    dtype = jnp.int32 if is_whole else jnp.float32
    product_dtype = jnp.bfloat16 if is_whole and not core.multiplies_int8 else x.dtype
    y = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, copies=copies, dtype=product_dtype),
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=core.vmem),
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


def _kernel(_, x_ref, values_ref, *refs, chunk: int, copies: int, dtype: Any):
    """Multiply a block: x [copies, R, I], values [O, I], possibly scales [G, O] -> y [R, O].

    The last chunk may have fewer groups. `dtype` is that of the products.
    """
    *scales_ref, y_ref = refs
    rows, inputs = y_ref.shape[0], values_ref.shape[1]
    is_exact = dtype in (jnp.bfloat16, jnp.int8)  # in one pass of the matrix unit
    precision = jax.lax.Precision.DEFAULT if is_exact else jax.lax.Precision.HIGHEST
    of_sums = jnp.int32 if dtype == jnp.int8 else jnp.float32

    def products(start: Any, size: int, parts: int) -> jax.Array:
        place = pl.ds(start, size)
        x = x_ref[:parts, :, place].reshape(parts * rows, size).astype(dtype)
        weights = values_ref[:, place].astype(dtype)
        y = jax.lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision, preferred_element_type=of_sums)
        return y.astype(y_ref.dtype)

    chunks, tail = divmod(inputs, chunk)
    if not scales_ref and (chunks, tail) == (1, 0):
        y_ref[...] = products(0, inputs, 1)
        return
    y_ref[...] = jnp.zeros_like(y_ref)

    def add(number: Any, start: Any, size: int, parts: int) -> None:
        sums = products(start, size, parts)
        if not scales_ref:
            y_ref[...] += sums
            return
        for copy in range(parts):
            scale = scales_ref[0][pl.ds(number * copies + copy, 1), :]
            y_ref[...] += sums[copy * rows : (copy + 1) * rows] * scale

    jax.lax.fori_loop(
        0, chunks, lambda number, _: add(number, pl.multiple_of(number * chunk, chunk), chunk, copies), None
    )
    if tail:
        add(chunks, chunks * chunk, tail, -(-tail * copies // chunk))


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
