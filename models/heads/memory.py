"""The memory of heads with decoder layers: keys and values of the pairs, and the output at the last pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import (
    causal_inputs,
    commit_first,
    commit_pairs,
    empty_cache,
    head_layout,
    last_entry,
    share_cache,
)
from specjax.models.heads.contract import FeaturePairs
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


class HeadMemory(NamedTuple):
    """The memory of the pairs that a head has read."""

    cache: kv.KVCache
    last: Array  # [B, W], output at the last pair
    skipped: Array | None = None  # int32[B], pairs that are not in the cache; None: heads that cache all pairs

    @property
    def num_pairs(self) -> Array:
        """Return the number int32[B] of pairs that were read."""
        return self.cache.length if self.skipped is None else self.cache.length + self.skipped


Layers = Callable[[L.PassInputs, kv.KVCache], tuple[Array, kv.Pending]]
"""`(inputs, cache)` -> the outputs [B, T, W] of pairs, and their cache entries."""


def init(
    context: Context, layer: LlamaConfig, width: int, batch: int, capacity: int, skips: bool = False
) -> HeadMemory:
    """Return an empty memory for outputs of width W = `width`. skips: some pairs will not be cached."""
    skipped = jnp.zeros((batch,), jnp.int32) if skips else None
    return HeadMemory(
        empty_cache(context, layer, batch, capacity), jnp.zeros((batch, width), layer.dtype), skipped
    )  # fmt: skip


def read(
    memory: HeadMemory, pairs: FeaturePairs, context: Context, layer: LlamaConfig, layers: Layers,
    is_kept: Array | None = None,
) -> HeadMemory:  # fmt: skip
    """Read pairs.

    Args: is_kept: bool[B, T], False for pairs that no token attends to, and that are not cached. The positions of the
      others do not change. None: all are kept.
    """
    step = causal_inputs(context, layer, memory.cache, pairs.tokens.shape[1], pairs.first)
    if memory.skipped is not None:
        step = step.replace(rotary=step.positions + memory.skipped[:, None])
    if is_kept is not None:
        return _read_kept(memory, pairs, context, layer, layers, step, is_kept)
    outputs, pending = layers(step, memory.cache)
    cache, last = commit_pairs(context, layer, memory.cache, pending, pairs), memory.last
    skipped = memory.skipped
    if skipped is not None and pairs.count.ndim == 2:
        skipped = jnp.zeros((pairs.count.size,), jnp.int32)
    return HeadMemory(cache, last_entry(outputs, pairs.count, last), skipped)


def _read_kept(
    memory: HeadMemory, pairs: FeaturePairs, context: Context, layer: LlamaConfig, layers: Layers, step: L.PassInputs,
    is_kept: Array,
) -> HeadMemory:  # fmt: skip
    """Read pairs, and cache those that are kept without gaps."""
    cache, last, skipped = memory
    assert skipped is not None, "only a head that counts skipped pairs can skip some"
    number = jnp.cumsum(is_kept, 1, dtype=jnp.int32)
    slots = cache.length[:, None] + number - 1
    itself = jnp.eye(is_kept.shape[1], dtype=bool)  # a softmax over nothing would be NaN
    mask = step.mask & (is_kept[:, None] | itself)
    outputs, pending = layers(step.replace(positions=slots, key_positions=slots, mask=mask), cache)
    order = jnp.argsort(~is_kept, 1, stable=True)
    outputs = take_along(outputs, order[..., None], 1)

    def kept_before(column: Array) -> Array:
        """Return the number of pairs that are kept among the first `column` int32[B, ...] ones."""
        flat = column.reshape(len(column), -1)
        return jnp.where(flat > 0, take_along(number, jnp.maximum(flat - 1, 0), 1), 0).reshape(column.shape)

    count = kept_before(pairs.count)
    if pairs.count.ndim == 1:
        cache = commit_first(context, layer, cache, pending, count, order)
        return HeadMemory(cache, last_entry(outputs, count, last), skipped + pairs.count - count)
    in_order = lambda x: take_along(x, order[:, None, :, None], 2)
    k, v = jax.tree.map(in_order, (pending.k, pending.v))
    first = None if pairs.first is None else take_along(kept_before(pairs.first), order, 1)
    shared = pairs._replace(count=jnp.maximum(count, 1), first=first)
    cache = share_cache(pending._replace(k=k, v=v), shared)
    return HeadMemory(cache, last_entry(outputs, shared.count, last), (pairs.count - count).reshape(-1))


def axes(memory: HeadMemory) -> Any:
    """Return the batch axis of each array."""
    return batch_axes.rows_first(memory)._replace(cache=kv.axes(memory.cache))


def shardings(layer: LlamaConfig) -> Callable[[HeadMemory, Mesh], Any]:
    """Return a function for `Head.shardings`."""

    def apply(memory: HeadMemory, mesh: Mesh) -> Any:
        layout = head_layout(mesh, layer)
        assert layout is not None
        rows: Any = jax.tree.map(layout.rows, (memory.last, memory.skipped))
        return HeadMemory(layout.cache(memory.cache), *rows)

    return apply
