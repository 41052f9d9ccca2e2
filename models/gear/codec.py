"""Compression of a block of keys or values to codes of a few bits, outliers and a low-rank correction.

The steps for a matrix of n tokens and h channels follow GEAR (arXiv 2403.05527):
  1. Vectors are the channels of keys and the tokens of values. The largest and the smallest entries of each vector are
     stored apart, and its mean takes their places.
  2. Groups of at most 64 entries of a vector are rounded to 2**bits equal steps from their minimum to their maximum.
  3. A product of rank `rank` approximates the remaining error. Power iteration finds it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.types import Array

GROUP = 64
"""Largest number of entries that share a minimum and a step, as in the paper."""
LOOPS = 3
"""Power iterations, as in the paper."""
STORED = jnp.uint16  # dtype of arrays that store the bits of float16, which XLA on CPU writes in place
LARGEST = float(jnp.finfo(jnp.float16).max)


class GearForm(NamedTuple):
    """The form of compressed blocks. All fields are static in a program."""

    bits: int = 4
    block: int = 64
    rank: int = 2
    outliers: float = 0.02

    def num_outliers(self, size: int) -> int:
        """Return the number of largest entries of a vector of `size` that are stored apart, and of smallest ones."""
        return min(max(round(size * self.outliers / 2), 1), size // 2) if self.outliers > 0 else 0


class GearBlocks(NamedTuple):
    """Compressed blocks of keys or values [..., n, h]: V vectors of N entries each. V and N are n and h in some order.

    Numbers of float16 are stored as their bits.
    """

    codes: Array  # uint8[..., V, N * bits / 8]
    low: Array  # uint16[..., V, groups], the minimum of each group
    step: Array  # uint16[..., V, groups]
    outliers: Array  # uint16[..., V, 2 * outliers]
    places: Array  # uint8[..., V, 2 * outliers], their indices in the vector
    left: Array  # uint16[..., n, rank], orthonormal columns
    right: Array  # uint16[..., h, rank]; the correction is left @ right.T


def compress(x: Array, form: GearForm, over_tokens: bool, numbers: Any = jnp.float16) -> GearBlocks:
    """Compress blocks x [..., n, h].

    Args:
      over_tokens: vectors are the channels, as for keys. Otherwise they are the tokens, as for values.
      numbers: dtype of minima, steps, outliers and factors. Tests use float32, which is not stored as bits.
    """
    x = x.astype(jnp.float32)
    vectors = x.swapaxes(-1, -2) if over_tokens else x
    size, count = vectors.shape[-1], form.num_outliers(vectors.shape[-1])
    order = jnp.argsort(vectors, -1)
    places = jnp.concatenate([order[..., :count], order[..., size - count :]], -1)
    outliers = _to_numbers(take_along(vectors, places, -1), numbers)
    mean = jnp.broadcast_to(jnp.mean(vectors, -1, keepdims=True), places.shape)
    groups = _in_groups(_replace(vectors, places, mean))
    low = _to_numbers(jnp.min(groups, -1), numbers)
    step = _to_numbers((jnp.max(groups, -1) - jnp.min(groups, -1)) / (2**form.bits - 1), numbers)
    width = _from_numbers(step)[..., None]
    codes = jnp.round((groups - _from_numbers(low)[..., None]) / jnp.where(width > 0, width, 1.0))
    codes = jnp.where(width > 0, jnp.clip(codes, 0, 2**form.bits - 1), 0).astype(jnp.uint8).reshape(vectors.shape)
    blocks = GearBlocks(
        _pack(codes, form.bits), low, step, outliers, places.astype(jnp.uint8), *_no_factors(x.shape, low.dtype)
    )
    if not form.rank:
        return blocks
    left, right = low_rank(x - expand(blocks, form, over_tokens), form.rank)
    return blocks._replace(left=_to_numbers(left, numbers), right=_to_numbers(right, numbers))


def expand(blocks: GearBlocks, form: GearForm, over_tokens: bool) -> Array:
    """Return the blocks float32[..., n, h] that `compress` approximates."""
    codes = _in_groups(_unpack(blocks.codes, form.bits).astype(jnp.float32))
    vectors = codes * _from_numbers(blocks.step)[..., None] + _from_numbers(blocks.low)[..., None]
    vectors = vectors.reshape(*vectors.shape[:-2], -1)
    vectors = _replace(vectors, blocks.places.astype(jnp.int32), _from_numbers(blocks.outliers))
    x = vectors.swapaxes(-1, -2) if over_tokens else vectors
    if not blocks.left.shape[-1]:
        return x
    return x + _product(_from_numbers(blocks.left), _from_numbers(blocks.right).swapaxes(-1, -2))


def low_rank(error: Array, rank: int) -> tuple[Array, Array]:
    """Return factors [..., n, rank] and [..., h, rank] whose product approximates error [..., n, h].

    The columns of the first factor are orthonormal. The second one is error.T @ left, so a column more never increases
    the remaining error.
    """
    rank = min(rank, *error.shape[-2:])
    start = np.random.default_rng(0).standard_normal((rank, error.shape[-1])).astype(np.float32).T
    right = jnp.broadcast_to(start, (*error.shape[:-2], *start.shape))
    left = _orthonormal(_product(error, right))
    for _ in range(LOOPS - 1):
        right = _orthonormal(_product(error.swapaxes(-1, -2), left))
        left = _orthonormal(_product(error, right))
    return left, _product(error.swapaxes(-1, -2), left)


def _orthonormal(x: Array) -> Array:
    """Return orthonormal columns that span those of x [..., n, rank]. Zero columns stay zero.

    These are few columns, for which the Gram-Schmidt process has less overhead than a QR decomposition of each matrix.
    It runs twice, which makes the columns orthogonal up to rounding.
    """
    columns: list[Array] = []
    for i in range(x.shape[-1]):
        column = x[..., i]
        for _ in range(2):
            for other in columns:
                column = column - jnp.sum(column * other, -1, keepdims=True) * other
        norm = jnp.sqrt(jnp.sum(column * column, -1, keepdims=True))
        columns.append(jnp.where(norm > 0, column / jnp.where(norm > 0, norm, 1.0), 0.0))
    return jnp.stack(columns, -1)


def _product(x: Array, y: Array) -> Array:
    """Multiply float32 matrices without rounding their entries to bfloat16, as a TPU would by default."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _replace(vectors: Array, places: Array, values: Array) -> Array:
    """Return vectors [..., N] with `values` [..., m] at `places` int32[..., m]. There is no scatter, as m is small."""
    entry = jnp.arange(vectors.shape[-1])
    for i in range(places.shape[-1]):
        vectors = jnp.where(entry == places[..., i : i + 1], values[..., i : i + 1], vectors)
    return vectors


def _in_groups(vectors: Array) -> Array:
    """Reshape [..., N] -> [..., groups, N / groups], of at most GROUP entries if that divides N."""
    size = vectors.shape[-1]
    return vectors.reshape(*vectors.shape[:-1], size // group_size(size), -1)


def group_size(size: int) -> int:
    """Return the number of entries of a group in a vector of `size` entries."""
    return GROUP if size % GROUP == 0 else size


def _no_factors(shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    return jnp.zeros((*shape[:-1], 0), dtype), jnp.zeros((*shape[:-2], shape[-1], 0), dtype)


def _to_numbers(x: Array, numbers: Any) -> Array:
    """Round x to the dtype `numbers`; float16 becomes its bits."""
    if numbers != jnp.float16:
        return x.astype(numbers)
    return jax.lax.bitcast_convert_type(jnp.clip(x, -LARGEST, LARGEST).astype(jnp.float16), STORED)


def _from_numbers(x: Array) -> Array:
    """Return float32 of stored numbers."""
    return (jax.lax.bitcast_convert_type(x, jnp.float16) if x.dtype == STORED else x).astype(jnp.float32)


def _pack(codes: Array, bits: int) -> Array:
    """Pack codes uint8[..., N] of `bits` bits into bytes uint8[..., N * bits / 8], the first in the lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    packed = parts[..., 0]
    for i in range(1, 8 // bits):
        packed = packed | parts[..., i] << (i * bits)
    return packed


def _unpack(packed: Array, bits: int) -> Array:
    """Return the codes uint8[..., N] of `_pack`."""
    parts = [packed >> (i * bits) & (2**bits - 1) for i in range(8 // bits)]
    return jnp.stack(parts, -1).reshape(*packed.shape[:-1], -1)
