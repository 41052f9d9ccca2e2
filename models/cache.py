"""The key/value cache of attention models: written only by `commit`, one length per row.

Keys and values are arrays of the model's dtype or, half as large and lossy, int8 with one float32 scale per token and
head (`specjax.numerics.quantization`). A quantised model rounds them as they are made, before any token sees them: committed,
pending or its own, a token's key is the same to all, so the model's distribution does not depend on what was drafted.

That is exact, but rounding magnifies what it is given: a product that another width of pass rounds otherwise turns a
few elements by a step, and later layers more. Of SmolLM2 in float32 the logits of two widths are up to 0.7 apart, as
far as those of int8 are from float32, and up to 1e-4 without int8. So near-ties are that wide (`NEAR_TIE`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.numerics.quantization import BITS, Quantized, quantize
from specjax.types import Array, PyTree

SLOTS = 128  # a cache has a multiple of these, as the TPU reads it in whole tiles
ROWS = 2  # by so many dimensions the rows stand before the tokens, in keys, values and scales


class KVCache(NamedTuple):
    """Keys and values of the first `length[b]` tokens of row b; what lies beyond is never read.

    `k` and `v` are a tuple of one array [B, K, S, head_dim] per layer, or one array [layers, B, K, S, head_dim], or any
    tree of such; each may be `Quantized`, or the bits of bfloat16.
    """

    k: PyTree
    v: PyTree
    length: Array  # int32[B]; or [B R], of R rows that share the tokens of each of the B of `k` and `v`
    first: Array | None = None  # of such rows, the first token that each one sees; None: 0


class Pending(NamedTuple):
    """Keys and values of T new tokens, not in the cache yet; like `KVCache` with T in place of S."""

    k: PyTree
    v: PyTree
    positions: Array  # int32[B, T]
    after: Array  # int32[B], from `after`


def after(x: Array) -> Array:
    """int32[B] of zeros that the compiler can only know once it has computed x [B, ...].

    Added to the index that `commit` writes at, it puts the write behind every read of the cache that led to x.
    Without it, XLA on CPU may write a layer's slots before they are read and copies the whole cache in every step to
    make that legal.
    """
    first = x[(slice(None), *(0,) * (x.ndim - 1))]
    bits = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
    return jnp.minimum((bits >> 1).astype(jnp.int32), 0)


def init(
    batch: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype, stacked: bool, lanes: int = 1,
    bits: bool = False,
) -> KVCache:  # fmt: skip
    """An empty cache of at least `capacity` slots. dtype: "int8" for a quantised one.

    lanes: `head_dim` is filled up with zeros to a multiple of these. With the 128 of a TPU's tiles heads of 64 take the
    room that they take there anyway, and the kernel reads them as they lie; otherwise the compiler keeps them with the
    slots in the lanes, and copies the whole cache for every kernel.

    bits: keep bfloat16 as uint16. XLA on CPU cuts and writes parts of bfloat16 by way of float32, and converts the
    whole array for it: SmolLM2 took 122 ms per token with a capacity of 8,192, and 37 with 512.
    """
    shape = (batch, num_kv_heads, -(-capacity // SLOTS) * SLOTS, -(-head_dim // lanes) * lanes)

    def empty(*shape):
        if jnp.dtype(dtype) == jnp.int8:
            return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
        return jnp.zeros(shape, BITS if bits and jnp.dtype(dtype) == jnp.bfloat16 else dtype)

    def zeros():
        return empty(num_layers, *shape) if stacked else tuple(empty(*shape) for _ in range(num_layers))

    return KVCache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))


def lanes_of(platform: str) -> int:
    """The `lanes` of `init` for programs that run on "tpu", "gpu" or "cpu"."""
    return 128 if platform == "tpu" else 1


def slots_of_part(x: Array | Quantized) -> int:
    """Slots that a device holds of keys or values [..., n, h] split over their slots."""
    return x.shape[-2] - SLOTS


def as_kept(x: Array, slots: Array | Quantized) -> Array | Quantized:
    """Keys or values x [B, K, T, h] as a cache with these slots keeps them."""
    x = fill_lanes(x, slots)
    return quantize(x) if isinstance(slots, Quantized) else x


def fill_lanes(x: Array, slots: Array | Quantized) -> Array:
    """x [..., h] with zeros up to the head size of a cache with these slots; they change no product of two vectors."""
    missing = slots.shape[-1] - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def commit(cache: KVCache, pending: Pending, path: Array, num_nodes: Array, first_slot: Array | None = None) -> KVCache:
    """Append nodes `path[b, :num_nodes[b]]` of `pending` to row b.

    A whole window of P slots is written from `length[b]` on; entries past `num_nodes` land beyond the new length, where
    they are never read. So the capacity must exceed the longest text by P (slices clamp silently otherwise).

    first_slot: int32[], the position of the first of these slots, if they are a part of a cache over several devices.
    Such a part has SLOTS slots more, behind those it holds, for what is not its own.
    """
    if first_slot is not None and path.shape[1] > SLOTS:
        raise UsageError(f"a cache split over its slots takes drafts of at most {SLOTS} nodes, not {path.shape[1]}")

    def write(axis, slots, new):  # [..., B, K, S, h], [..., B, K, T, h]; of scales [..., B, K, S], [..., B, K, T]
        rows = axis - ROWS
        shape = [1] * new.ndim
        shape[rows], shape[axis] = path.shape
        chosen = take_along(new, jnp.maximum(path, 0).reshape(shape), axis)
        if slots.dtype == BITS:
            chosen = jax.lax.bitcast_convert_type(chosen, BITS)
        chosen, start = chosen.astype(slots.dtype), cache.length + pending.after
        batch = slots.shape[rows]

        # Row by row: a `vmap` of this is a scatter, for which the TPU compiler wants the cache in another layout than
        # the attention kernel reads, and copies all of it twice per step.
        def row(b, slots):
            place: list[Any] = [0] * slots.ndim
            place[rows], place[axis] = b, start[b]
            new = jax.lax.dynamic_slice_in_dim(chosen, b, 1, rows)
            if first_slot is not None:
                new, place[axis] = _within(new, start[b] - first_slot, slots.shape[axis] - SLOTS, axis)
            return jax.lax.dynamic_update_slice(slots, new, place)

        return jax.lax.fori_loop(0, batch, row, slots, unroll=min(batch, 8))

    k, v = _along_tokens(write, (cache.k, cache.v), (pending.k, pending.v))
    return KVCache(k, v, cache.length + num_nodes)


def _within(new: Array, start: Array, held: int, axis: int) -> tuple[Array, Array]:
    """The tokens of a window at slot `start` that a part of `held` slots is to write, and where; others go behind it.

    What lies before the part falls away, what then follows the window's own tokens lies past the text.
    """
    count = new.shape[axis]
    start = jnp.clip(start, -count, held)
    behind = jnp.pad(new, [(0, count if n == axis % new.ndim else 0) for n in range(new.ndim)])
    return jax.lax.dynamic_slice_in_dim(behind, jnp.maximum(-start, 0), count, axis), jnp.maximum(start, 0)


def widen(pending: Pending, slots: int) -> Pending:
    """`pending` with room for `slots` tokens, those behind its own empty."""
    k, v = _along_tokens(lambda axis, x: batch_axes.widen(x, slots, axis), (pending.k, pending.v))
    return pending._replace(k=k, v=v, positions=batch_axes.widen(pending.positions, slots))


def first_of(pending: Pending, count: int) -> Pending:
    """The first `count` tokens of what is pending."""
    k, v = _along_tokens(lambda axis, x: jax.lax.slice_in_dim(x, 0, count, axis=axis), (pending.k, pending.v))
    return pending._replace(k=k, v=v, positions=pending.positions[:, :count])


def nothing_pending(cache: KVCache, slots: int) -> Pending:
    """Room for `slots` tokens beside a cache of arrays that are not stacked, nothing in it."""

    batch = cache.length.shape[0]

    def empty(axis, x):
        shape = list(x.shape)
        shape[axis - ROWS], shape[axis] = batch, slots
        return jnp.zeros(shape, jnp.bfloat16 if x.dtype == BITS else x.dtype)

    k, v = _along_tokens(empty, (cache.k, cache.v))
    return Pending(k, v, jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))


def insert(pending: Pending, new: Pending, place: Array | int) -> Pending:
    """`pending` with the tokens of `new` from slot `place` on: an int, int32[], or int32[B] per row; or each in a slot
    of its own, int32[B, T], where those behind the last slot fall away."""

    def write(axis, old, new):
        return batch_axes.insert(old, new, place, axis, axis - ROWS)

    k, v = _along_tokens(write, (pending.k, pending.v), (new.k, new.v))
    return Pending(k, v, batch_axes.insert(pending.positions, new.positions, place), new.after)


def axes(held: KVCache | Pending) -> PyTree:
    """The place of the rows in the shape of each array."""
    k, v = _along_tokens(lambda axis, x: x.ndim + axis - ROWS, (held.k, held.v))
    return batch_axes.rows_first(held)._replace(k=k, v=v)


def _along_tokens(fn: Callable[..., Any], keys: PyTree, *others: PyTree) -> PyTree:
    """`fn(axis, *arrays)` on the arrays of keys or values, with the axis of the tokens, counted from the end.

    They are [..., B, K, T, h], their scales [..., B, K, T]; what stands before the rows counts layers.
    """

    def one(x, *others):
        if isinstance(x, Quantized):
            values = fn(-2, x.values, *(other.values for other in others))
            return Quantized(values, fn(-1, x.scale, *(other.scale for other in others)))
        return fn(-2, x, *others)

    return jax.tree.map(one, keys, *others, is_leaf=lambda x: isinstance(x, Quantized))


def shared(pending: Pending, count: Array, first: Array | None = None) -> KVCache:
    """What is pending as the cache of B R rows, which hold the first `count` int32[B, R] of it, from `first` on.

    Nothing can be committed to it: it is for passes that only read, such as drafting from many places of one text.
    """
    return KVCache(pending.k, pending.v, count.reshape(-1), None if first is None else first.reshape(-1))


def rewind(cache: KVCache, length: Array) -> KVCache:
    """Forget all but the first `length[b]` tokens of row b."""
    return cache._replace(length=jnp.minimum(cache.length, length))
