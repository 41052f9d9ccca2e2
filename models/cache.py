"""Key/value cache of attention models. Only `commit` writes it, and every row has its own length.

Keys and values are arrays of the model's dtype. They can also be int8 with one float32 scale per token and head, which
takes half the memory and is lossy (`specjax.numerics.quantization`). A quantised model rounds keys and values when it
computes them, before any token attends to them. A token's key is therefore the same for all tokens, whether it is
committed, pending or the token's own. So the model's distribution does not depend on the drafted tokens.

This is exact, but rounding amplifies small differences. A matmul that rounds differently in a pass of another width
moves a few elements by one quantisation step, and later layers amplify that. For SmolLM2 in float32 the logits of two
pass widths differ by up to 0.7, as much as int8 differs from float32; without int8 they differ by up to 1e-4. Near-ties
are that wide (`specjax.bench.near_ties` measures it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes, platforms, texts
from specjax.arrays.indexing import take_along
from specjax.numerics.quantization import BITS, Quantized, quantize
from specjax.types import Array, PyTree

SLOTS = 128  # the number of slots is a multiple of this, because the TPU reads whole tiles
ROWS_BEFORE_TOKENS = 2  # the row axis lies this many axes before the token axis, in keys, values and scales


class KVCache(NamedTuple):
    """Keys and values of the first `length[b]` tokens of row b. Later slots are never read.

    `k` and `v` are a tuple of one array [B, K, S, head_dim] per layer, or one array [layers, B, K, S, head_dim].
    Any tree of such arrays works too. Each array may be `Quantized`, or bfloat16 stored as its bits.
    """

    k: PyTree
    v: PyTree
    length: Array  # int32[B], or int32[B R] if R rows share each of the B rows of `k` and `v`
    first: Array | None = None  # int32[B R], the first token that each of these rows sees; None: 0


class Pending(NamedTuple):
    """Keys and values of T new tokens that are not in the cache yet. The shapes are those of `KVCache` with T for S."""

    k: PyTree
    v: PyTree
    positions: Array  # int32[B, T]
    write_dependency: Array  # int32[B], from `write_dependency`


def write_dependency(x: Array) -> Array:
    """Return int32[B] zeros that the compiler can only evaluate after it has computed x [B, ...].

    `commit` adds them to the slot index that it writes at. That orders the write after every cache read that led to x.
    Without it, XLA on CPU may write a layer's slots before they are read. It then copies the whole cache in every step.
    """
    first = x[(slice(None), *(0,) * (x.ndim - 1))]
    bits = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
    return jnp.minimum((bits >> 1).astype(jnp.int32), 0)


def init(
    batch: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype, stacked: bool, lanes: int = 1,
    bits: bool = False,
) -> KVCache:  # fmt: skip
    """Build an empty cache of at least `capacity` slots.

    Args:
      dtype: dtype of keys and values; "int8" makes a quantised cache.
      lanes: `head_dim` is padded with zeros to a multiple of this. Use 128 on a TPU. Its tiles take that memory for
        heads of 64 anyway, and the kernel then reads the cache without a copy. Otherwise the compiler stores slots in
        the lanes and copies the whole cache for every kernel call.
      bits: store bfloat16 as uint16. XLA on CPU slices and updates bfloat16 arrays through float32, and converts the
        whole array for it. SmolLM2 took 122 ms per token with a capacity of 8,192, and 37 ms with 512.
    """
    shape = (batch, num_kv_heads, -(-capacity // SLOTS) * SLOTS, -(-head_dim // lanes) * lanes)

    def empty(*shape):
        if jnp.dtype(dtype) == jnp.int8:
            return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
        return jnp.zeros(shape, BITS if bits and jnp.dtype(dtype) == jnp.bfloat16 else dtype)

    def zeros():
        return empty(num_layers, *shape) if stacked else tuple(empty(*shape) for _ in range(num_layers))

    return KVCache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))


def has_layer_axis(keys: PyTree) -> bool:
    """Return True for keys or values of all layers in one array, and False for a tuple of one array per layer."""
    return isinstance(keys, Quantized) or not isinstance(keys, tuple)


def slots_per_device(x: Array | Quantized) -> int:
    """Return the slots that one device stores of keys or values [..., n, h] that are split over their slots."""
    return x.shape[-2] - SLOTS


def to_cache_dtype(x: Array, slots: Array | Quantized) -> Array | Quantized:
    """Convert keys or values x [B, K, T, h] to the form of these slots: pad heads and quantise if needed."""
    x = pad_head_dim(x, slots)
    return quantize(x) if isinstance(slots, Quantized) else x


def pad_head_dim(x: Array, slots: Array | Quantized) -> Array:
    """Pad x [..., h] with zeros to the head size of a cache with these slots. Zeros change no dot product."""
    padding = slots.shape[-1] - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def commit(cache: KVCache, pending: Pending, path: Array, num_nodes: Array, first_slot: Array | None = None) -> KVCache:
    """Append nodes `path[b, :num_nodes[b]]` of `pending` to row b.

    A whole window of P slots is written from `length[b]` on. Entries past `num_nodes` land beyond the new length, where
    they are never read. So the capacity must exceed the longest text by P; otherwise the slice is clamped silently.

    Args:
      first_slot: int32[], position of the first of these slots if they are one device's part of a cache that is split
        over its slots. Such a part has SLOTS extra slots at its end for entries of other devices, so longer windows are
        written in pieces.
    """
    if first_slot is None:
        return _commit_window(cache, pending, path, num_nodes, None)
    for start in range(0, path.shape[1], SLOTS):
        piece = path[:, start : start + SLOTS]
        cache = _commit_window(cache, pending, piece, jnp.clip(num_nodes - start, 0, piece.shape[1]), first_slot)
    return cache


def _commit_window(
    cache: KVCache, pending: Pending, path: Array, num_nodes: Array, first_slot: Array | None
) -> KVCache:
    """Append nodes in one window, as `commit` does."""

    def along_path(new, axis):
        shape = [1] * new.ndim
        shape[axis - ROWS_BEFORE_TOKENS], shape[axis] = path.shape
        return take_along(new, jnp.maximum(path, 0).reshape(shape), axis)

    def write(axis, slots, new):  # [..., B, K, S, h], [..., B, K, T, h]; of scales [..., B, K, S], [..., B, K, T]
        rows = axis - ROWS_BEFORE_TOKENS
        # A gather of a whole chunk of the prompts would be one of the largest arrays of a prefill.
        selected = new if texts.is_in_order(path) and path.shape[1] == new.shape[axis] else along_path(new, axis)
        if slots.dtype == BITS:
            selected = jax.lax.bitcast_convert_type(selected, BITS)
        selected, start = selected.astype(slots.dtype), cache.length + pending.write_dependency
        batch = slots.shape[rows]

        if batch > 1 and first_slot is None and platforms.of_program() == "gpu":
            return write_rows(slots, selected, start, rows, axis)

        # Write row by row. A `vmap` of this is a scatter. For that the TPU compiler wants another cache layout than the
        # attention kernel reads, and copies the whole cache twice per step.
        def row(b, slots):
            start_indices: list[Any] = [0] * slots.ndim
            start_indices[rows], start_indices[axis] = b, start[b]
            new = jax.lax.dynamic_slice_in_dim(selected, b, 1, rows)
            if first_slot is not None:
                new, start_indices[axis] = _clip_window(new, start[b] - first_slot, slots.shape[axis] - SLOTS, axis)
            return jax.lax.dynamic_update_slice(slots, new, start_indices)

        return jax.lax.fori_loop(0, batch, row, slots, unroll=min(batch, 8))

    k, v = _map_arrays(write, (cache.k, cache.v), (pending.k, pending.v))
    return KVCache(k, v, cache.length + num_nodes)


def commit_to_ring(cache: KVCache, pending: Pending, count: Array, window: int) -> KVCache:
    """Append the first `count` int32[B] tokens of `pending` to a cache of the newest `window` tokens.

    The token with the number n has slot n mod `window`. The cache has one array of floats per layer, and its `length`
    counts all tokens that were ever appended.
    """
    index = jnp.arange(pending.positions.shape[1])
    is_new = (index < count[:, None]) & (index >= count[:, None] - window)
    start = (cache.length + pending.write_dependency)[:, None]

    def write(axis: int, slots: Array, new: Array) -> Array:
        new = jax.lax.bitcast_convert_type(new, BITS) if slots.dtype == BITS else new.astype(slots.dtype)
        place = jnp.where(is_new, (start + index) % window, slots.shape[axis])  # a slot past the end is dropped
        one_row = lambda slots, new, place: slots.at[:, place].set(new, mode="drop")
        return jax.vmap(one_row)(slots, new, place)

    k, v = _map_arrays(write, (cache.k, cache.v), (pending.k, pending.v))
    return KVCache(k, v, cache.length + count)


def write_rows(slots: Array, new: Array, start: Array, rows: int, axis: int) -> Array:
    """Write `new` to the slots from `start` int32[B] on, all rows in one scatter.

    On a GPU that is one kernel, and row by row there are as many kernels as rows.

    rows, axis: the axes of the rows and of the slots, counted from the end.
    """
    one_row = lambda slots, new, start: jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis)
    rows %= slots.ndim
    return jax.vmap(one_row, (rows, rows, 0), rows)(slots, new, start)


def _clip_window(new: Array, start: Array, num_slots: int, axis: int) -> tuple[Array, Array]:
    """Return the tokens of a window at slot `start` that a part of `num_slots` slots writes, and the slot to write them
    at.

    Tokens before the part are dropped. Tokens of other parts go to the extra slots at the end. The entries that follow
    the window's own tokens lie past the text.
    """
    count = new.shape[axis]
    start = jnp.clip(start, -count, num_slots)
    padded = jnp.pad(new, [(0, count if n == axis % new.ndim else 0) for n in range(new.ndim)])
    return jax.lax.dynamic_slice_in_dim(padded, jnp.maximum(-start, 0), count, axis), jnp.maximum(start, 0)


def widen(pending: Pending, slots: int) -> Pending:
    """Pad `pending` with empty entries to `slots` tokens."""
    k, v = _map_arrays(lambda axis, x: batch_axes.widen(x, slots, axis), (pending.k, pending.v))
    return pending._replace(k=k, v=v, positions=batch_axes.widen(pending.positions, slots))


def truncate_pending(pending: Pending, count: int) -> Pending:
    """Return the first `count` tokens of `pending`."""
    k, v = _map_arrays(lambda axis, x: jax.lax.slice_in_dim(x, 0, count, axis=axis), (pending.k, pending.v))
    return pending._replace(k=k, v=v, positions=pending.positions[:, :count])


def empty_pending(cache: KVCache, slots: int) -> Pending:
    """Return an empty `Pending` of `slots` tokens for a cache with one array per layer."""

    batch = cache.length.shape[0]

    def empty(axis, x):
        shape = list(x.shape)
        shape[axis - ROWS_BEFORE_TOKENS], shape[axis] = batch, slots
        return jnp.zeros(shape, jnp.bfloat16 if x.dtype == BITS else x.dtype)

    k, v = _map_arrays(empty, (cache.k, cache.v))
    return Pending(k, v, jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))


def insert(pending: Pending, new: Pending, slot: Array | int) -> Pending:
    """Write the tokens of `new` into `pending` from slot `slot` on.

    slot: an int, int32[], or int32[B] per row. int32[B, T] gives every token its own slot, and tokens beyond the last
    slot are dropped.
    """

    def write(axis, old, new):
        return batch_axes.insert(old, new, slot, axis, axis - ROWS_BEFORE_TOKENS)

    k, v = _map_arrays(write, (pending.k, pending.v), (new.k, new.v))
    return Pending(k, v, batch_axes.insert(pending.positions, new.positions, slot), new.write_dependency)


def axes(arrays: KVCache | Pending) -> PyTree:
    """Return the index of the row axis of each array."""
    k, v = _map_arrays(lambda axis, x: x.ndim + axis - ROWS_BEFORE_TOKENS, (arrays.k, arrays.v))
    return batch_axes.rows_first(arrays)._replace(k=k, v=v)


def _map_arrays(fn: Callable[..., Any], keys: PyTree, *other_trees: PyTree) -> PyTree:
    """Map `fn(axis, *arrays)` over keys or values, where `axis` is the token axis, counted from the end.

    Arrays are [..., B, K, T, h] and their scales [..., B, K, T]. Axes before B count layers.
    """

    def map_leaf(x, *other_trees):
        if isinstance(x, Quantized):
            values = fn(-2, x.values, *(other.values for other in other_trees))
            return Quantized(values, fn(-1, x.scale, *(other.scale for other in other_trees)))
        return fn(-2, x, *other_trees)

    return jax.tree.map(map_leaf, keys, *other_trees, is_leaf=lambda x: isinstance(x, Quantized))


def share_pending(pending: Pending, count: Array, first: Array | None = None) -> KVCache:
    """Return `pending` as the cache of B R rows, which contain its tokens `first` to `count`, both int32[B, R].

    It cannot be committed to. It serves passes that only read, such as drafting from many positions of one text.
    """
    return KVCache(pending.k, pending.v, count.reshape(-1), None if first is None else first.reshape(-1))


def rewind(cache: KVCache, length: Array) -> KVCache:
    """Forget all but the first `length[b]` tokens of row b."""
    return cache._replace(length=jnp.minimum(cache.length, length))


class ConditionedCache(NamedTuple):
    """The keys and values of a text, and what the text depends on beside its tokens, which never changes."""

    text: KVCache
    memory: Any  # arrays [B, ...] of an encoded source or of images; None: the text has none


def commit_text(cache: ConditionedCache, pending: Pending, path: Array, num_nodes: Array) -> ConditionedCache:
    """Append nodes to the text, see `commit`."""
    return cache._replace(text=commit(cache.text, pending, path, num_nodes))


def rewind_text(cache: ConditionedCache, length: Array) -> ConditionedCache:
    """Forget all but the first `length` int32[B] tokens of the text."""
    return cache._replace(text=rewind(cache.text, length))


def conditioned_axes(arrays: ConditionedCache | Pending) -> PyTree:
    """Return the index of the row axis of each array."""
    if not isinstance(arrays, ConditionedCache):
        return axes(arrays)
    return ConditionedCache(axes(arrays.text), batch_axes.rows_first(arrays.memory))
