"""The cache of GEAR: compressed blocks of tokens, and a tail of the newest tokens in full precision.

Of a row of n tokens, blocks 0 to n // block - 1 are stored compressed. The tail begins at the start of the last of
these blocks, so it has at most 2 * block - 1 tokens. A token that a query may read in full precision is always there.
Nothing is written for tokens that are not committed, so rejected drafts leave no trace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models.gear.codec import GearBlocks, GearForm, compress
from specjax.numerics.quantization import BITS
from specjax.types import Array, PyTree

ROWS, TOKENS = 1, 3  # axes of the rows and of the tokens in a tail [layers, B, K, n, h]
BLOCKS = 3  # axis of the blocks in the arrays of `GearBlocks`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GearSlots:
    """Keys or values of all layers. They stand for slots [layers, B, K, S, h].

    The last of the compressed blocks is scratch, which rows without a new block write to.
    """

    blocks: GearBlocks  # arrays [layers, B, K, S / block + 1, ...]
    tail: Array  # [layers, B, K, 3 * block, h]; bfloat16 may be stored as its bits
    form: GearForm = field(metadata={"static": True})
    over_tokens: bool = field(metadata={"static": True})  # see `compress`

    @property
    def num_blocks(self) -> int:
        """Return the number of compressed blocks without the scratch block."""
        return self.blocks.codes.shape[BLOCKS] - 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tail.shape[:TOKENS], self.num_blocks * self.form.block, self.tail.shape[-1])

    def __len__(self) -> int:
        return len(self.tail)


def init(
    batch: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype, form: GearForm,
    bits: bool = False,
) -> kv.KVCache:  # fmt: skip
    """Build an empty cache of at least `capacity` slots. The arguments are those of `kv.init`."""
    unit = math.lcm(kv.SLOTS, form.block)
    num_blocks = -(-capacity // unit) * unit // form.block
    rows = num_layers, batch, num_kv_heads
    tail_dtype = BITS if bits and jnp.dtype(dtype) == jnp.bfloat16 else dtype

    def zeros(over_tokens: bool) -> GearSlots:
        one = jax.eval_shape(
            lambda x: compress(x, form, over_tokens), jax.ShapeDtypeStruct((form.block, head_dim), jnp.float32)
        )
        blocks = jax.tree.map(lambda x: jnp.zeros((*rows, num_blocks + 1, *x.shape), x.dtype), one)
        return GearSlots(blocks, jnp.zeros((*rows, 3 * form.block, head_dim), tail_dtype), form, over_tokens)

    return kv.KVCache(zeros(True), zeros(False), jnp.zeros((batch,), jnp.int32))


def tail_start(length: Array, block: int) -> Array:
    """Return the position of the first token in the tail of a row of `length` tokens."""
    return jnp.maximum(length // block - 1, 0) * block


def commit(cache: kv.KVCache, pending: kv.Pending, path: Array, num_nodes: Array) -> kv.KVCache:
    """Append nodes `path[b, :num_nodes[b]]` of `pending` to row b, and compress the blocks that become full.

    A long path is committed in pieces of one block, so that a piece fills at most one block.
    """
    block = cache.k.form.block
    stack = lambda keys: keys if kv.has_layer_axis(keys) else jnp.stack(keys)
    pending = pending._replace(k=stack(pending.k), v=stack(pending.v))
    size = path.shape[1]
    if size <= block:
        return _commit_piece(cache, pending, path, num_nodes)
    path = jnp.pad(path, [(0, 0), (0, -size % block)])

    def body(i, cache: kv.KVCache) -> kv.KVCache:
        piece = jax.lax.dynamic_slice_in_dim(path, i * block, block, 1)
        return _commit_piece(cache, pending, piece, jnp.clip(num_nodes - i * block, 0, block))

    return jax.lax.fori_loop(0, (jnp.max(num_nodes) + block - 1) // block, body, cache)


def _commit_piece(cache: kv.KVCache, pending: kv.Pending, path: Array, num_nodes: Array) -> kv.KVCache:
    """Append at most `block` nodes to each row."""
    block = cache.k.form.block
    full, end = cache.length // block, cache.length + num_nodes
    is_due = end // block > full
    start = cache.length - tail_start(cache.length, block) + pending.write_dependency
    index = jnp.where(is_due, full, cache.k.num_blocks) + pending.write_dependency

    def append(slots: GearSlots, new: Array) -> GearSlots:
        selected = take_along(new, jnp.maximum(path, 0)[None, :, None, :, None], TOKENS)
        selected = jax.lax.bitcast_convert_type(selected, BITS) if slots.tail.dtype == BITS else selected
        tail = _write(slots.tail, selected.astype(slots.tail.dtype), start)
        # Only the small results pass through the branches. A branch that returned the cache would copy it.
        fill = functools.partial(_compress_full, slots.form, slots.over_tokens)
        blocks, tail = jax.lax.cond(jnp.any(is_due), fill, functools.partial(_leave, fill), tail, full, is_due)
        blocks = jax.tree.map(lambda old, new: _write(old, new[:, :, :, None], index), slots.blocks, blocks)
        return replace(slots, blocks=blocks, tail=tail)

    return kv.KVCache(append(cache.k, pending.k), append(cache.v, pending.v), end)


def _compress_full(
    form: GearForm, over_tokens: bool, tail: Array, full: Array, is_due: Array
) -> tuple[GearBlocks, Array]:
    """Return the compressed block number `full` int32[B] of each row, and the tail without the block before it."""
    cut = lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, form.block, TOKENS - 1)
    x = jax.vmap(cut, (ROWS, 0), ROWS)(tail, jnp.minimum(full, 1) * form.block)
    moves = (is_due & (full > 0))[None, :, None, None, None]
    tail = jnp.where(moves, jnp.roll(tail, -form.block, TOKENS), tail)
    return compress(as_floats(x), form, over_tokens), tail


def _leave(fill: Callable[..., tuple[GearBlocks, Array]], tail: Array, *rows: Array) -> tuple[GearBlocks, Array]:
    """Return zeros in place of the blocks of `fill`, and the tail as it is."""
    blocks, _ = jax.eval_shape(fill, tail, *rows)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blocks), tail


def as_floats(x: Array) -> Array:
    """Return keys or values of a tail as numbers, if they are stored as bits."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == BITS else x


def _write(old: Array, new: Array, start: Array) -> Array:
    """Write new [layers, B, K, n, ...] to `old` from `start` int32[B] on in axis 3, row by row, in place."""

    def row(b, old: Array) -> Array:
        first = [0, b, 0, start[b], *[0] * (old.ndim - 4)]
        return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(new, b, 1, ROWS), first)

    batch = old.shape[ROWS]
    return jax.lax.fori_loop(0, batch, row, old, unroll=min(batch, 8)) if old.size else old


def axes(arrays: kv.KVCache | kv.Pending) -> PyTree:
    """Return the index of the row axis of each array of a cache or of pending entries."""
    if isinstance(arrays, kv.Pending):
        return kv.axes(arrays)
    k, v = jax.tree.map(lambda x: ROWS, (arrays.k, arrays.v))
    return batch_axes.rows_first(arrays)._replace(k=k, v=v)
