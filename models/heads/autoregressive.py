"""Heads of decoder layers that feed their own output back in place of the target's features: the EAGLE family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.blocks import among_drafted, bind, step_of
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.heads.memory import HeadMemory
from specjax.types import Array, Context


class AutoregressiveScratch(NamedTuple):
    """Of the drafted nodes."""

    cache: kv.KVCache
    pending: kv.Pending  # by place; the root's is empty, since its pair is in the cache
    said: Array  # [B, places, W], what the layers said of each


class AutoregressiveModule(Protocol):
    """What a head of this kind is made of."""

    def embedded(self, tokens: Array, context: Context) -> Array:
        """[B, T, D]."""

    def fused(self, features: Array) -> Array:
        """[B, T, F] of the target -> [B, T, D], the state of a committed pair."""

    def layers(self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        """What it says [B, T, W] of pairs of a state and the embedding of the token after it."""

    def fed_back(self, said: Array) -> Array:
        """[..., W] -> [..., D], the state of a drafted token."""

    def logits(self, said: Array, context: Context) -> Array:
        """float32[..., V] of what follows."""


@functools.cache
def autoregressive(kind: str, module: Callable[..., Any], config: Any) -> Head:
    """The head of `module(config)`, a `AutoregressiveModule`; `config.layer` has the shapes of its layers, `config.said` is W."""
    module_of, layer = bind(module, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, config.said, batch, capacity)

    def read(params, held: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        module = module_of(params)
        embedded, state = module.embedded(pairs.tokens, context), module.fused(pairs.features.astype(layer.dtype))
        return memory.read(held, pairs, context, layer, lambda step, cache: module.layers(embedded, state, step, cache))

    def start(params, held: HeadMemory, context: Context, places: int) -> tuple[AutoregressiveScratch, Array]:
        cache, last = held
        said = jnp.zeros((last.shape[0], places, last.shape[1]), last.dtype).at[:, 0].set(last)
        scratch = AutoregressiveScratch(cache, kv.empty_pending(cache, places), said)
        return scratch, module_of(params).logits(last, context)

    def follow(params, scratch: AutoregressiveScratch, drafted: DraftedNodes, context: Context) -> tuple[AutoregressiveScratch, Array]:
        module, (cache, pending, said) = module_of(params), scratch
        state = module.fed_back(take_along(said, drafted.parent[:, :, None], 1))
        # The pair of the root is the last in the cache, at length - 1; a node of depth d stands d behind it.
        positions = cache.length[:, None] - 1 + drafted.depth
        step = step_of(context, layer, cache, positions, among_drafted(drafted), pending)
        new_said, new = module.layers(module.embedded(drafted.tokens, context), state, step, cache)
        said = batch_axes.insert(said, new_said, drafted.place)
        return AutoregressiveScratch(cache, kv.insert(pending, new, drafted.place), said), module.logits(new_said, context)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind=kind,
        config=config,
        taps=config.taps,
        feature=lambda scratch, place: scratch.said[:, place, -layer.width :],
        axes=memory.axes,
        shardings=memory.shardings(layer),
    )
