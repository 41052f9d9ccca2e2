"""What a head with layers remembers of the pairs it has read: their keys and values, and what it said of the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.arrays import batch_axes
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import commit_pairs, empty_cache, layout_of, newest, next_step
from specjax.models.heads.contract import FeaturePairs
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


class HeadMemory(NamedTuple):
    """Of the pairs that were read."""

    cache: kv.KVCache
    last: Array  # [B, W], what was said of the last of them


def init(context: Context, layer: LlamaConfig, width: int, batch: int, capacity: int) -> HeadMemory:
    """Of no pairs. width: W."""
    return HeadMemory(empty_cache(context, layer, batch, capacity), jnp.zeros((batch, width), layer.dtype))


def read(
    memory: HeadMemory,
    pairs: FeaturePairs,
    context: Context,
    layer: LlamaConfig,
    layers: Callable[[L.PassInputs, kv.KVCache], tuple[Array, kv.Pending]],
) -> HeadMemory:
    """`layers` says [B, T, W] of the pairs behind the cache."""
    cache, last = memory
    said, pending = layers(next_step(context, layer, cache, pairs.tokens.shape[1], pairs.first), cache)
    return HeadMemory(commit_pairs(context, layer, cache, pending, pairs), newest(said, pairs.count, last))


def axes(memory: HeadMemory) -> Any:
    """The place of B in the shape of each array."""
    return batch_axes.rows_first(memory)._replace(cache=kv.axes(memory.cache))


def shardings(layer: LlamaConfig) -> Callable[[HeadMemory, Mesh], Any]:
    """`Head.shardings`."""

    def of(memory: HeadMemory, mesh: Mesh) -> Any:
        layout = layout_of(mesh, layer)
        assert layout is not None
        last: Any = layout.rows(memory.last)
        return memory._replace(cache=layout.cache(memory.cache), last=last)

    return of
