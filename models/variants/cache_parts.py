"""Parts of a key/value cache: entries of consecutive tokens, and of selected ones.

They serve drafters that read a small cache made from the target's. If a cache is beside images, they are parts of its
text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.numerics.quantization import BITS, Quantized
from specjax.types import Array, PyTree

Cache = kv.KVCache | kv.ConditionedCache


def growing_part(cache: Any) -> Any:
    """Return the part of a cache that grows with the text: all of it, except for encoded sources and images."""
    return cache.text if isinstance(cache, kv.ConditionedCache) else cache


def with_growing_part(cache: Any, text: Any) -> Any:
    """Return a cache with another `growing_part`."""
    return cache._replace(text=text) if isinstance(cache, kv.ConditionedCache) else text


def num_slots(cache: Cache) -> int:
    """Return the slots of each row."""
    keys = growing_part(cache).k
    first = keys if kv.has_layer_axis(keys) else keys[0]
    return (first.values if isinstance(first, Quantized) else first).shape[-2]


def read_entries(cache: Cache, start: Array, count: int) -> kv.Pending:
    """Return the entries of `count` tokens from `start` int32[B] on, as pending ones."""

    def read(slots: Array, rows: int) -> Array:
        tokens = rows + kv.ROWS_BEFORE_TOKENS
        of_row = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, count, tokens - 1)
        return jax.vmap(of_row, (rows, 0), rows)(slots, start)

    text = growing_part(cache)
    axes = kv.axes(text)
    k, v = jax.tree.map(read, (text.k, text.v), (axes.k, axes.v))
    return kv.Pending(k, v, start[:, None] + jnp.arange(count), jnp.zeros_like(start))


def gather_slots(small: Cache, cache: Cache, slots: Array, length: Array) -> Cache:
    """Return `small` with the entries of `cache` at `slots` in its first slots, and with `length` int32[B] tokens.

    slots: int32[layers, B, K or 1, b]. Entries at slots that the cache does not have may be anything.
    """
    old, text = growing_part(small), growing_part(cache)
    if kv.has_layer_axis(text.k):
        gather = lambda old, keys: _gather(old, keys, slots)
    else:
        gather = lambda old, keys: tuple(map(_gather, old, keys, slots))
    return with_growing_part(small, kv.KVCache(gather(old.k, text.k), gather(old.v, text.v), length))


def _gather(old: PyTree, keys: PyTree, slots: Array) -> PyTree:
    """Return `old` with the entries of `keys` at `slots` int32[..., B, K or 1, b] in its first b slots."""
    axis = slots.ndim - 1

    def of_array(old: Array, keys: Array) -> Array:
        index = jnp.minimum(slots, keys.shape[axis] - 1)
        index = index.reshape(index.shape + (1,) * (keys.ndim - index.ndim))
        return jax.lax.dynamic_update_slice(old, take_along(keys, index, axis), (0,) * old.ndim)

    return jax.tree.map(of_array, old, keys)


def upper_half(cache: Cache) -> Cache:
    """Return an int8 cache by the upper four bits of its codes, each in the middle of the 16 codes that share them.

    An entry differs from that of the cache by at most 8 times its scale.
    """
    of_vectors = lambda x: Quantized((x.values & -16) + 8, x.scale)
    text = growing_part(cache)
    k, v = jax.tree.map(of_vectors, (text.k, text.v), is_leaf=lambda x: isinstance(x, Quantized))
    return with_growing_part(cache, text._replace(k=k, v=v))


def map_keys(fn: Callable[..., Array], queries: tuple[Array, ...], *caches: Cache | kv.Pending) -> Array:
    """Return `fn(queries of a layer, its keys float[B, K, S, h] in each cache)` of each layer, stacked."""
    of_layer = lambda parts: fn(parts[0], *map(_floats, parts[1:]))
    keys = [growing_part(cache).k for cache in caches]
    if kv.has_layer_axis(keys[0]):
        return jax.lax.map(of_layer, (jnp.stack(queries), *keys))
    return jnp.stack([of_layer(parts) for parts in zip(queries, *keys, strict=True)])


def keys_of_last_layer(cache: Cache) -> Array:
    """Return the keys float[B, K, S, h] of the last layer."""
    return _floats(growing_part(cache).k[-1])


def _floats(keys: PyTree) -> Array:
    """Return the keys of a layer as floating-point numbers."""
    if isinstance(keys, Quantized):
        return keys.values * keys.scale[..., None]
    return jax.lax.bitcast_convert_type(keys, jnp.bfloat16) if keys.dtype == BITS else keys
