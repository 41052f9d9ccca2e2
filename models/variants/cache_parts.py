"""Parts of a key/value cache: entries of consecutive tokens, and of selected ones.

They serve drafters that read a small cache made from the target's.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.numerics.quantization import BITS, Quantized
from specjax.types import Array, PyTree


def num_slots(cache: kv.KVCache) -> int:
    """Return the slots of each row."""
    first = cache.k if kv.has_layer_axis(cache.k) else cache.k[0]
    return (first.values if isinstance(first, Quantized) else first).shape[-2]


def read_entries(cache: kv.KVCache, start: Array, count: int) -> kv.Pending:
    """Return the entries of `count` tokens from `start` int32[B] on, as pending ones."""

    def read(slots: Array, rows: int) -> Array:
        tokens = rows + kv.ROWS_BEFORE_TOKENS
        of_row = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, count, tokens - 1)
        return jax.vmap(of_row, (rows, 0), rows)(slots, start)

    axes = kv.axes(cache)
    k, v = jax.tree.map(read, (cache.k, cache.v), (axes.k, axes.v))
    return kv.Pending(k, v, start[:, None] + jnp.arange(count), jnp.zeros_like(start))


def gather_slots(small: kv.KVCache, cache: kv.KVCache, slots: Array, length: Array) -> kv.KVCache:
    """Return `small` with the entries of `cache` at `slots` in its first slots, and with `length` int32[B] tokens.

    slots: int32[layers, B, K or 1, b]. Entries at slots that the cache does not have may be anything.
    """
    if kv.has_layer_axis(cache.k):
        gather = lambda old, keys: _gather(old, keys, slots)
    else:
        gather = lambda old, keys: tuple(map(_gather, old, keys, slots))
    return kv.KVCache(gather(small.k, cache.k), gather(small.v, cache.v), length)


def _gather(old: PyTree, keys: PyTree, slots: Array) -> PyTree:
    """Return `old` with the entries of `keys` at `slots` int32[..., B, K or 1, b] in its first b slots."""
    axis = slots.ndim - 1

    def of_array(old: Array, keys: Array) -> Array:
        index = jnp.minimum(slots, keys.shape[axis] - 1)
        index = index.reshape(index.shape + (1,) * (keys.ndim - index.ndim))
        return jax.lax.dynamic_update_slice(old, take_along(keys, index, axis), (0,) * old.ndim)

    return jax.tree.map(of_array, old, keys)


def upper_half(cache: kv.KVCache) -> kv.KVCache:
    """Return an int8 cache by the upper four bits of its codes, each in the middle of the 16 codes that share them.

    An entry differs from that of the cache by at most 8 times its scale.
    """
    of_vectors = lambda x: Quantized((x.values & -16) + 8, x.scale)
    k, v = jax.tree.map(of_vectors, (cache.k, cache.v), is_leaf=lambda x: isinstance(x, Quantized))
    return cache._replace(k=k, v=v)


def map_keys(fn: Callable[..., Array], queries: tuple[Array, ...], *caches: kv.KVCache | kv.Pending) -> Array:
    """Return `fn(queries of a layer, its keys float[B, K, S, h] in each cache)` of each layer, stacked."""
    of_layer = lambda parts: fn(parts[0], *map(_floats, parts[1:]))
    keys = [cache.k for cache in caches]
    if kv.has_layer_axis(keys[0]):
        return jax.lax.map(of_layer, (jnp.stack(queries), *keys))
    return jnp.stack([of_layer(parts) for parts in zip(queries, *keys, strict=True)])


def keys_of_last_layer(cache: kv.KVCache) -> Array:
    """Return the keys float[B, K, S, h] of the last layer."""
    return _floats(cache.k[-1])


def _floats(keys: PyTree) -> Array:
    """Return the keys of a layer as floating-point numbers."""
    if isinstance(keys, Quantized):
        return keys.values * keys.scale[..., None]
    return jax.lax.bitcast_convert_type(keys, jnp.bfloat16) if keys.dtype == BITS else keys
