"""The EAGLE family: decoder layers that feed their own output back in place of the target's features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import image_rows, memory
from specjax.models.heads.blocks import bind, drafted_mask, pass_inputs
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, StateDraft
from specjax.models.heads.memory import HeadMemory
from specjax.types import Array, Context


class AutoregressiveScratch(NamedTuple):
    """The drafted nodes of one step."""

    cache: kv.KVCache
    pending: kv.Pending  # new cache entries by place; empty for the root, whose pair is already in the cache
    outputs: Array  # [B, places, W], the outputs of the layers
    skipped: Array | None = None  # `HeadMemory.skipped`


class AutoregressiveModule(Protocol):
    """The module that a head of this family consists of."""

    def embedded(self, tokens: Array, context: Context) -> Array:
        """Return the embeddings [B, T, D]."""

    def fused(self, features: Array) -> Array:
        """Return the states [B, T, D] of committed pairs from the target's features [B, T, F]."""

    def layers(self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        """Return the outputs [B, T, W] for states and the embeddings of their next tokens, and the cache entries."""

    def fed_back(self, outputs: Array) -> Array:
        """Return the states [..., D] of drafted tokens from the outputs [..., W]."""

    def logits(self, outputs: Array, context: Context) -> Array:
        """Return the logits float32[..., V] of the next tokens."""


@functools.cache
def autoregressive(kind: str, module: Callable[..., Any], config: Any, reads_images: bool = False) -> Head:
    """Build the head of `module(config)`, an `AutoregressiveModule`.

    `config.layer` has the shapes of its layers, and `config.output_width` is W.

    reads_images: it is an `image_rows.ImageModule` too.
    """
    module_of, layer = bind(module, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, config.output_width, batch, capacity, skips=reads_images)

    def read(params, state: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        module = module_of(params)
        if reads_images:
            return image_rows.read_pairs(module, state, pairs, context, layer)
        embedded, fused = module.embedded(pairs.tokens, context), module.fused(pairs.features.astype(layer.dtype))
        layers = lambda step, cache: module.layers(embedded, fused, step, cache)
        return memory.read(state, pairs, context, layer, layers)

    def start_outputs(params, state: HeadMemory, context: Context, places: int) -> tuple[AutoregressiveScratch, Array]:
        cache, last, skipped = state
        outputs = jnp.zeros((last.shape[0], places, last.shape[1]), last.dtype).at[:, 0].set(last)
        return AutoregressiveScratch(cache, kv.empty_pending(cache, places), outputs, skipped), last

    def follow_outputs(
        params, scratch: AutoregressiveScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[AutoregressiveScratch, Array]:
        module, (cache, pending, outputs, skipped) = module_of(params), scratch
        state = module.fed_back(take_along(outputs, drafted.parent[:, :, None], 1))
        # The pair of the root is the last one in the cache, at length - 1. A node of depth d is d positions after it.
        positions = cache.length[:, None] - 1 + drafted.depth
        step = pass_inputs(context, layer, cache, positions, drafted_mask(drafted), pending)
        if skipped is not None:
            step = step.replace(rotary=positions + skipped[:, None])
        new_outputs, new = module.layers(module.embedded(drafted.tokens, context), state, step, cache)
        outputs = batch_axes.insert(outputs, new_outputs, drafted.place)
        scratch = AutoregressiveScratch(cache, kv.insert(pending, new, drafted.place), outputs, skipped)
        return scratch, new_outputs

    def logits(params, outputs: Array, context: Context) -> Array:
        return module_of(params).logits(outputs, context)

    def start(params, state: HeadMemory, context: Context, places: int) -> tuple[AutoregressiveScratch, Array]:
        scratch, outputs = start_outputs(params, state, context, places)
        return scratch, logits(params, outputs, context)

    def follow(
        params, scratch: AutoregressiveScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[AutoregressiveScratch, Array]:
        scratch, outputs = follow_outputs(params, scratch, drafted, context)
        return scratch, logits(params, outputs, context)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind=kind,
        config=config,
        taps=config.taps,
        feature=lambda scratch, place: scratch.outputs[:, place, -layer.width :],
        axes=memory.axes,
        shardings=memory.shardings(layer),
        in_states=StateDraft(start_outputs, follow_outputs, logits),
        reads_images=reads_images,
    )
