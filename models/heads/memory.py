"""The memory of heads with decoder layers: keys and values of the pairs, and the output at the last pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.arrays import batch_axes
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import causal_inputs, commit_pairs, empty_cache, head_layout, last_entry
from specjax.models.heads.contract import FeaturePairs
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


class HeadMemory(NamedTuple):
    """The memory of the pairs that a head has read."""

    cache: kv.KVCache
    last: Array  # [B, W], output at the last pair


def init(context: Context, layer: LlamaConfig, width: int, batch: int, capacity: int) -> HeadMemory:
    """Return an empty memory for outputs of width W = `width`."""
    return HeadMemory(empty_cache(context, layer, batch, capacity), jnp.zeros((batch, width), layer.dtype))


def read(
    memory: HeadMemory,
    pairs: FeaturePairs,
    context: Context,
    layer: LlamaConfig,
    layers: Callable[[L.PassInputs, kv.KVCache], tuple[Array, kv.Pending]],
) -> HeadMemory:
    """Read pairs. `layers(inputs, cache)` returns their outputs [B, T, W] and pending cache entries."""
    cache, last = memory
    outputs, pending = layers(causal_inputs(context, layer, cache, pairs.tokens.shape[1], pairs.first), cache)
    return HeadMemory(commit_pairs(context, layer, cache, pending, pairs), last_entry(outputs, pairs.count, last))


def axes(memory: HeadMemory) -> Any:
    """Return the batch axis of each array."""
    return batch_axes.rows_first(memory)._replace(cache=kv.axes(memory.cache))


def shardings(layer: LlamaConfig) -> Callable[[HeadMemory, Mesh], Any]:
    """Return a function for `Head.shardings`."""

    def apply(memory: HeadMemory, mesh: Mesh) -> Any:
        layout = head_layout(mesh, layer)
        assert layout is not None
        last: Any = layout.rows(memory.last)
        return memory._replace(cache=layout.cache(memory.cache), last=last)

    return apply
