"""The key/value cache of attention models: written only by `commit`, one length per row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Array, PyTree

SLOTS = 128  # a cache has a multiple of these, as the TPU reads it in whole tiles


class KVCache(NamedTuple):
    """Keys and values of the first `length[b]` tokens of row b; what lies beyond is never read.

    `k` and `v` are a tuple of one array [B, K, S, head_dim] per layer, or one array [layers, B, K, S, head_dim].
    """

    k: PyTree
    v: PyTree
    length: Array  # int32[B]


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


def init(batch: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype, stacked: bool) -> KVCache:
    """An empty cache of at least `capacity` slots."""
    shape = (batch, num_kv_heads, -(-capacity // SLOTS) * SLOTS, head_dim)

    def zeros():
        if stacked:
            return jnp.zeros((num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

    return KVCache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))


def commit(cache: KVCache, pending: Pending, path: Array, num_nodes: Array) -> KVCache:
    """Append nodes `path[b, :num_nodes[b]]` of `pending` to row b.

    A whole window of P slots is written from `length[b]` on; entries past `num_nodes` land beyond the new length, where
    they are never read. So the capacity must exceed the longest text by P (slices clamp silently otherwise).
    """

    def write(slots, new):  # [..., B, K, S, h], [..., B, K, T, h]
        chosen = jnp.take_along_axis(new, _over(jnp.maximum(path, 0), new), axis=-2)
        chosen, start, batch = chosen.astype(slots.dtype), cache.length + pending.after, slots.shape[-4]

        # Row by row: a `vmap` of this is a scatter, for which the TPU compiler wants the cache in another layout than
        # the attention kernel reads, and copies all of it twice per step.
        def row(b, slots):
            place = [0] * (slots.ndim - 4) + [b, 0, start[b], 0]
            return jax.lax.dynamic_update_slice(slots, jax.lax.dynamic_slice_in_dim(chosen, b, 1, -4), place)

        return jax.lax.fori_loop(0, batch, row, slots, unroll=min(batch, 8))

    k, v = jax.tree.map(write, (cache.k, cache.v), (pending.k, pending.v))
    return KVCache(k, v, cache.length + num_nodes)


def _over(path: Array, new: Array) -> Array:
    """`path` [B, P] shaped to index axis -2 of `new`."""
    return path.reshape((1,) * (new.ndim - 4) + (path.shape[0], 1, path.shape[1], 1))


def widen(pending: PyTree, slots: int) -> PyTree:
    """`pending` with room for `slots` tokens, those behind its own empty."""
    return jax.tree.map(lambda x: jnp.pad(x, _behind(x, slots - x.shape[_axis(x)])) if x.ndim > 1 else x, pending)


def insert(pending: PyTree, new: PyTree, place: Array | int) -> PyTree:
    """`pending` with the tokens of `new` at slot `place` and following."""

    def write(old, new):
        return new if old.ndim < 2 else jax.lax.dynamic_update_slice_in_dim(old, new, place, _axis(old))

    return jax.tree.map(write, pending, new)


def _axis(x: Array) -> int:
    """The axis of the tokens: positions are [B, T], keys and values [..., B, K, T, h]."""
    return 1 if x.ndim == 2 else x.ndim - 2


def _behind(x: Array, count: int) -> list[tuple[int, int]]:
    return [(0, count if axis == _axis(x) else 0) for axis in range(x.ndim)]


def rewind(cache: KVCache, length: Array) -> KVCache:
    """Forget all but the first `length[b]` tokens of row b."""
    return cache._replace(length=jnp.minimum(cache.length, length))
