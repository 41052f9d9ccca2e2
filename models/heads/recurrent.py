"""Recurrent heads, which carry a state down the draft: Hydra, Clover, ReDrafter and the MLP speculator.

    output at the last pair, root  ->  state 0  ->  logits after the root
                  state 0, draft 1 ->  state 1  ->  logits after draft 1, ...

The state of each node is stored by its place, and its children start from it.
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
from specjax.models.heads.blocks import bind, last_entry
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head
from specjax.types import Array, Context, PyTree


class RecurrentModule(Protocol):
    """The module that a recurrent head consists of."""

    def layers(
        self, features: Array, tokens: Array, context: Context, step: L.PassInputs, cache: kv.KVCache
    ) -> tuple[Array, kv.Pending]:
        """Return the outputs [B, T, W] at pairs, and the cache entries. Heads without layers need no such method."""

    def at_root(self, outputs: Array, tokens: Array, context: Context) -> PyTree:
        """Return the state [B, 1, ..] of the root int32[B, 1], from the output [B, 1, W] at the last pair."""

    def below(self, state: PyTree, tokens: Array, depth: Array, context: Context) -> PyTree:
        """Return the states [B, F, ..] of nodes int32[B, F] at `depth`, from the states of their parents."""

    def logits(self, outputs: Array, state: PyTree, depth: Array | int, context: Context) -> Array:
        """Return the logits float32[B, F, V] after nodes at `depth`, 0 for the root. outputs: [B, 1, W]."""


class RecurrentScratch(NamedTuple):
    """The drafted nodes of one step."""

    outputs: Array  # [B, 1, W], at the last pair
    states: PyTree  # [B, places, ..] each


@functools.cache
def recurrent(
    kind: str,
    module: Callable[..., Any],
    config: Any,
    *,
    max_depth: int | None = None,
    trained_depth: int | None = None,
) -> Head:
    """Build the head of `module(config)`, a `RecurrentModule`.

    `config.layer` has the shapes of its layers or is None, and `config.output_width` is W. The memory of the head is a
    `HeadMemory`, or the last feature [B, W] for a head without layers.
    """
    module_of, layer = bind(module, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> PyTree:
        if layer is None:
            return jnp.zeros((batch, config.output_width), config.dtype)
        return memory.init(context, layer, config.output_width, batch, capacity)

    def read(params, state: PyTree, pairs: FeaturePairs, context: Context) -> PyTree:
        if layer is None:
            return last_entry(pairs.features, pairs.count, state)
        features = pairs.features.astype(layer.dtype)
        layers = functools.partial(module_of(params).layers, features, pairs.tokens, context)
        return memory.read(state, pairs, context, layer, layers)

    def start(params, state: PyTree, context: Context, places: int) -> tuple[RecurrentScratch, Array]:
        module, outputs = module_of(params), (state if layer is None else state.last)[:, None]
        root = module.at_root(outputs, context.root, context)
        scratch = RecurrentScratch(outputs, batch_axes.widen(root, places))
        return scratch, module.logits(outputs, root, 0, context)[:, 0]

    def follow(
        params, scratch: RecurrentScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[RecurrentScratch, Array]:
        module, (outputs, states) = module_of(params), scratch
        parents = jax.tree.map(lambda x: gather_places(x, drafted.parent), states)
        state = module.below(parents, drafted.tokens, drafted.depth, context)
        logits = module.logits(outputs, state, drafted.depth, context)
        return RecurrentScratch(outputs, batch_axes.insert(states, state, drafted.place)), logits

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind=kind,
        config=config,
        taps=config.taps,
        max_depth=max_depth,
        trained_depth=trained_depth,
        axes=batch_axes.rows_first if layer is None else memory.axes,
        shardings=None if layer is None else memory.shardings(layer),
    )


def gather_places(x: Array, place: Array) -> Array:
    """Return the entries [B, F, ..] of x [B, places, ..] at `place` int32[B, F]."""
    return take_along(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), 1)


def extend_path(path: Array, tokens: Array, depth: Array) -> Array:
    """Return paths int32[B, F, K] from the root to nodes at `depth`, given the paths to their parents."""
    return jnp.where(jnp.arange(path.shape[2]) == depth[:, :, None], tokens[:, :, None], path)
