"""Cache of a hybrid decoder: keys and values of its attention layers, and the states of its recurrent layers.

Each kind of layer has its own entries, in the order of the layers. Entries of stacked layers have a leading axis, which
counts the repetitions of the group. A recurrent state cannot go back, so models with one do not rewind. A layer that
reads the keys of another has no entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.models import cache as kv
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.recurrence import RecurrentState, Updates, commit_path
from specjax.models.layers import LayerCache
from specjax.models.layout import Layout
from specjax.numerics.quantization import Quantized
from specjax.types import Array, PyTree


class HybridCache(NamedTuple):
    """Memory of the committed text."""

    attention: kv.KVCache  # k and v are tuples with one array per layer with keys of its own; v: None if latent
    recurrent: tuple[RecurrentState, ...]  # one per recurrent layer

    @property
    def length(self) -> Array:
        """Return the number of committed tokens, int32[B]."""
        return self.attention.length

    @property
    def first(self) -> Array | None:
        """Return the first token that each row sees, or None if all see their text from the start."""
        return self.attention.first


class HybridPending(NamedTuple):
    """Entries of T new tokens that are not committed yet."""

    attention: kv.Pending
    recurrent: tuple[Updates, ...]

    @property
    def positions(self) -> Array:
        """Return the positions of the tokens, int32[B, T]."""
        return self.attention.positions


def init_cache(c: HybridConfig, batch: int, capacity: int) -> HybridCache:
    """Return an empty cache with room for `capacity` tokens. Only attention needs memory per token."""
    repeats = (c.num_layers // c.period,) if c.stacked else ()
    members = [(kind, c.of_layer(i)) for i, kind in enumerate(c.kinds[: c.num_members])]
    layers = [layer for kind, layer in members if kind.has_keys]
    empty = lambda layer: _empty_keys(layer, (*repeats, batch), capacity)
    keys = tuple(map(empty, layers))
    values = tuple(None if layer.latent is not None else empty(layer) for layer in layers)
    states = tuple(_empty_state(layer, kind.mixer, (*repeats, batch)) for kind, layer in members if kind.recurs)
    return HybridCache(kv.KVCache(keys, values, jnp.zeros((batch,), jnp.int32)), states)


def _empty_keys(c: HybridConfig, leading: tuple[int, ...], capacity: int) -> Array | Quantized:
    """Return empty keys or values of a layer. `leading` is the batch, after the repetitions of stacked layers."""
    dtype, (*repeats, batch) = c.cache_dtype or c.dtype, leading
    cache = kv.init(
        batch, capacity, repeats[0] if repeats else 1, c.num_kv_heads, c.head_dim, dtype, bool(repeats), c.cache_lanes,
        c.cache_bits,
    )  # fmt: skip
    return cache.k if repeats else cache.k[0]


def _empty_state(c: HybridConfig, mixer: str, leading: tuple[int, ...]) -> RecurrentState:
    """Return the state of a layer before the start of a text."""
    if mixer == "short_convolution":
        return RecurrentState(jnp.zeros((*leading, c.convolution_kernel - 1, c.width), c.dtype))
    if mixer == "gated_delta":
        sizes = c.gated_delta
        assert sizes is not None
        kernel, channels = sizes.kernel, sizes.channels
        shape = sizes.num_value_heads, sizes.key_dim, sizes.value_dim
    else:
        mamba = c.mamba2
        assert mamba is not None
        kernel, channels, shape = mamba.kernel, mamba.channels, (mamba.num_heads, mamba.state_dim, mamba.head_dim)
    window = jnp.zeros((*leading, kernel - 1, channels), c.dtype)
    return RecurrentState(window, jnp.zeros((*leading, *shape), jnp.float32))


def commit(
    cache: HybridCache, pending: HybridPending, path: Array, num_nodes: Array, layout: Layout | None = None
) -> HybridCache:
    """Add the nodes `path[b, :num_nodes[b]]` to row b, as in `specjax.Model`."""
    commit_keys = kv.commit if layout is None else layout.commit
    attention = commit_keys(cache.attention, pending.attention, path, num_nodes)
    in_layer = lambda memory, updates: commit_path(memory, updates, path, num_nodes)
    states = []
    for memory, updates in zip(cache.recurrent, pending.recurrent, strict=True):
        is_stacked = _row_axis(memory) == 1
        states.append((jax.vmap(in_layer) if is_stacked else in_layer)(memory, updates))
    return HybridCache(attention, tuple(states))


def layer_cache(c: HybridConfig, cache: HybridCache, layer: int) -> LayerCache:
    """Return the keys and values that the layer of this number stores."""
    place, attention = c.place_of_keys(layer % c.period if c.stacked else layer), cache.attention
    repeat = jnp.int32(layer // c.period) if c.stacked else None
    return LayerCache(attention.k[place], attention.v[place], repeat)


def rewind(cache: HybridCache, length: Array) -> HybridCache:
    """Forget all but the first `length[b]` tokens of row b, in a model without recurrent layers."""
    assert not cache.recurrent, "a recurrent state cannot go back"
    return cache._replace(attention=kv.rewind(cache.attention, length))


def _row_axis(entry: RecurrentState | Updates) -> int:
    """Return the axis of rows: 1 if the entry has a leading axis of layers, else 0."""
    first = entry.window if isinstance(entry, RecurrentState) else entry.inputs
    return first.ndim - 3


def axes(arrays: HybridCache | HybridPending) -> PyTree:
    """Return the index of the row axis of each array."""
    of_entry = lambda entry: jax.tree.map(lambda x: _row_axis(entry), entry)
    return arrays._replace(attention=kv.axes(arrays.attention), recurrent=tuple(map(of_entry, arrays.recurrent)))


def widen(pending: HybridPending, slots: int) -> HybridPending:
    """Pad `pending` with empty entries to `slots` tokens."""
    pad = lambda rows, x: batch_axes.widen(x, slots, rows + 1)
    return HybridPending(kv.widen(pending.attention, slots), _map_updates(pad, pending.recurrent))


def insert(pending: HybridPending, new: HybridPending, slot: Array | int) -> HybridPending:
    """Write the tokens of `new` into `pending` from slot `slot` on, as in `specjax.models.cache.insert`."""
    write = lambda rows, old, x: batch_axes.insert(old, x, slot, rows + 1, rows)
    attention = kv.insert(pending.attention, new.attention, slot)
    return HybridPending(attention, _map_updates(write, pending.recurrent, new.recurrent))


def _map_updates(fn: Callable[..., Any], updates: tuple[Updates, ...], *others: tuple[Updates, ...]) -> Any:
    """Map `fn(row axis, *arrays)` over the arrays of the updates of each layer."""
    of_layer = lambda first, *rest: jax.tree.map(functools.partial(fn, _row_axis(first)), first, *rest)
    return tuple(map(of_layer, updates, *others))


def shardings(layout: Layout, arrays: HybridCache | HybridPending) -> PyTree:
    """Return the shardings of a cache or of pending tokens: rows over "data", heads as in attention."""
    place = lambda x, *parts: None if x is None else layout.sharding(x.shape, *parts)

    def of_entry(entry: RecurrentState | Updates) -> Any:
        if isinstance(entry, RecurrentState):
            return (place(entry.window, "data", None, None), place(entry.state, "data", "heads", None, None))
        return place(entry.inputs, "data", None, None), *(place(x, "data", None, "heads", None) for x in entry[1:])

    recurrent: Any = tuple(type(entry)(*of_entry(entry)) for entry in arrays.recurrent)
    return arrays._replace(attention=layout.cache(arrays.attention), recurrent=recurrent)
