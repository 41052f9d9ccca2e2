"""Heads that carry a state down the draft beside what they said of the last pair: Hydra, Clover, ReDrafter and others.

    said s of the last pair, root  ->  state 0  ->  what follows the root
                  state 0, draft 1 ->  state 1  ->  what follows draft 1, ...

A node's state is kept by its place, and its children begin from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.blocks import bind, newest
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.types import Array, Context, PyTree


class RecurrentModule(Protocol):
    """What a head of this kind is made of."""

    def layers(
        self, features: Array, tokens: Array, context: Context, step: L.PassInputs, cache: kv.KVCache
    ) -> tuple[Array, kv.Pending]:
        """What it says [B, T, W] of pairs. Not asked of a head without layers: that says the features themselves."""

    def at_root(self, said: Array, tokens: Array, context: Context) -> PyTree:
        """[B, 1, ..] each: the state of the root int32[B, 1], of which the last pair, [B, 1, W], knows already."""

    def below(self, state: PyTree, tokens: Array, depth: Array, context: Context) -> PyTree:
        """[B, F, ..] each, of nodes int32[B, F] at `depth` int32[B, F], from the states of their parents."""

    def logits(self, said: Array, state: PyTree, depth: Array | int, context: Context) -> Array:
        """float32[B, F, V] of what follows nodes at `depth`; 0: the root. said: [B, 1, W]."""


class RecurrentScratch(NamedTuple):
    said: Array  # [B, 1, W]
    states: PyTree  # [B, places, ..] each


@functools.cache
def recurrent(kind: str, module: Callable[..., Any], config: Any, *, max_depth: int | None = None) -> Head:
    """The head of `module(config)`, a `RecurrentModule`; `config.layer` has the shapes of its layers or is None, `config.said`
    is W. Memory: a `memory.HeadMemory`, or without layers the last feature [B, W].
    """
    module_of, layer = bind(module, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> PyTree:
        if layer is None:
            return jnp.zeros((batch, config.said), config.dtype)
        return memory.init(context, layer, config.said, batch, capacity)

    def read(params, held: PyTree, pairs: FeaturePairs, context: Context) -> PyTree:
        if layer is None:
            return newest(pairs.features, pairs.count, held)
        features = pairs.features.astype(layer.dtype)
        layers = functools.partial(module_of(params).layers, features, pairs.tokens, context)
        return memory.read(held, pairs, context, layer, layers)

    def start(params, held: PyTree, context: Context, places: int) -> tuple[RecurrentScratch, Array]:
        module, said = module_of(params), (held if layer is None else held.last)[:, None]
        state = module.at_root(said, context.root, context)
        return RecurrentScratch(said, batch_axes.widen(state, places)), module.logits(said, state, 0, context)[:, 0]

    def follow(params, scratch: RecurrentScratch, drafted: DraftedNodes, context: Context) -> tuple[RecurrentScratch, Array]:
        module, (said, states) = module_of(params), scratch
        above = jax.tree.map(lambda x: at_places(x, drafted.parent), states)
        state = module.below(above, drafted.tokens, drafted.depth, context)
        logits = module.logits(said, state, drafted.depth, context)
        return RecurrentScratch(said, batch_axes.insert(states, state, drafted.place)), logits

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind=kind,
        config=config,
        taps=config.taps,
        max_depth=max_depth,
        axes=batch_axes.rows_first if layer is None else memory.axes,
        shardings=None if layer is None else memory.shardings(layer),
    )


def at_places(x: Array, place: Array) -> Array:
    """[B, F, ..] of [B, places, ..] at `place` int32[B, F]."""
    return take_along(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), 1)


def longer(path: Array, tokens: Array, depth: Array) -> Array:
    """int32[B, F, K]: the tokens from the root down to nodes at `depth`, from those down to their parents."""
    return jnp.where(jnp.arange(path.shape[2]) == depth[:, :, None], tokens[:, :, None], path)
