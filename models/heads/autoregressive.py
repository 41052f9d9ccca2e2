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
from specjax.models.heads.contract import Drafted, Head, Pairs
from specjax.models.heads.memory import Memory
from specjax.types import Array, Context


class Scratch(NamedTuple):
    """Of the drafted nodes."""

    cache: kv.KVCache
    pending: kv.Pending  # by place; the root's is empty, since its pair is in the cache
    said: Array  # [B, places, W], what the layers said of each


class Module(Protocol):
    """What a head of this kind is made of."""

    def embedded(self, tokens: Array, context: Context) -> Array:
        """[B, T, D]."""

    def fused(self, features: Array) -> Array:
        """[B, T, F] of the target -> [B, T, D], the state of a committed pair."""

    def layers(self, embedded: Array, state: Array, step: L.Step, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        """What it says [B, T, W] of pairs of a state and the embedding of the token after it."""

    def fed_back(self, said: Array) -> Array:
        """[..., W] -> [..., D], the state of a drafted token."""

    def logits(self, said: Array, context: Context) -> Array:
        """float32[..., V] of what follows."""


@functools.cache
def autoregressive(kind: str, module: Callable[..., Any], config: Any) -> Head:
    """The head of `module(config)`, a `Module`; `config.layer` has the shapes of its layers, `config.said` is W."""
    module_of, layer = bind(module, config), config.layer

    def begin(params, context: Context, batch: int, capacity: int) -> Memory:
        return memory.begin(context, layer, config.said, batch, capacity)

    def read(params, held: Memory, pairs: Pairs, context: Context) -> Memory:
        module = module_of(params)
        embedded, state = module.embedded(pairs.tokens, context), module.fused(pairs.features.astype(layer.dtype))
        return memory.read(held, pairs, context, layer, lambda step, cache: module.layers(embedded, state, step, cache))

    def start(params, held: Memory, context: Context, places: int) -> tuple[Scratch, Array]:
        cache, last = held
        said = jnp.zeros((last.shape[0], places, last.shape[1]), last.dtype).at[:, 0].set(last)
        scratch = Scratch(cache, kv.nothing_pending(cache, places), said)
        return scratch, module_of(params).logits(last, context)

    def follow(params, scratch: Scratch, drafted: Drafted, context: Context) -> tuple[Scratch, Array]:
        module, (cache, pending, said) = module_of(params), scratch
        state = module.fed_back(take_along(said, drafted.parent[:, :, None], 1))
        # The pair of the root is the last in the cache, at length - 1; a node of depth d stands d behind it.
        positions = cache.length[:, None] - 1 + drafted.depth
        step = step_of(context, layer, cache, positions, among_drafted(drafted), pending)
        new_said, new = module.layers(module.embedded(drafted.tokens, context), state, step, cache)
        said = batch_axes.insert(said, new_said, drafted.place)
        return Scratch(cache, kv.insert(pending, new, drafted.place), said), module.logits(new_said, context)

    return Head(
        begin=begin,
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
