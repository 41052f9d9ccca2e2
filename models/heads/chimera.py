"""Chimera: trigrams stand in for the features that the target has not computed, in one layer over its features.

Zeng et al.: Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all Tokens
(2024), arXiv 2402.15758. g_i = T(c + SiLU(W c + b)) for c = [E x_{i-2}; E x_{i-1}; E x_i]; the layers read

    position   0   1   ...  n-2      n-1      n        n+1
    input     f_0 f_1  ... f_{n-2}   g_root
    then                             y_root   g_1
    then                             y_root   y_1      g_2

where y is what they said of the trigram that it takes the place of; logits_i = W_i [f_{n-2}; y] say draft i + 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.blocks import (
    Residual,
    among_drafted,
    bind,
    by_depth,
    embed,
    root_of,
    run_blocks,
    step_of,
    with_root,
)
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.heads.eagle import Layer
from specjax.models.heads.memory import HeadMemory
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class ChimeraConfig:
    """Shapes of a Chimera head. Published: num_heads `chimera_num_heads`.

    Parameters: trigram and down `trimlp.pt` `0.` and `1.`, stack[i] `fast_layer1.pt` `i.`, heads[i] `chimera_head.pt`
    `i.0`.
    """

    layer: LlamaConfig  # of its layers; of the target's width
    vocab_size: int
    num_heads: int
    taps: tuple[int, ...] = ()


class Chimera(nnx.Module):
    """Trigrams, layers and heads."""

    def __init__(self, config: ChimeraConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.trigram = Residual(3 * c.width, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(3 * c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.stack = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers)])
        head = lambda: L.Embedding(config.vocab_size, 2 * c.width, dtype=c.dtype, rngs=rngs)
        self.heads = nnx.List([head() for _ in range(config.num_heads)])

    def layers(self, x: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        return run_blocks(list(self.stack), x, step, cache, self.config.layer)

    def embedded(self, before: Array, tokens: Array, position: Array, context: Context) -> Array:
        """g [B, F, D] of tokens int32[B, F] at `position`, and the two `before` each, int32[B, F, 2]."""
        two, one = before[:, :, 0], before[:, :, 1]
        # The authors' left border: (x_0, x_0, x_0) and (x_0, x_1, x_1).
        two = jnp.where(position > 1, two, jnp.where(position == 1, one, tokens))
        one = jnp.where(position > 1, one, tokens)
        three = jnp.stack([two, one, tokens], 2).reshape(len(tokens), -1)
        x = embed(None, three, context).astype(self.config.layer.dtype)
        return self.down(self.trigram(x.reshape(*tokens.shape, -1)))

    def logits(self, feature: Array, y: Array, depth: Array | int) -> Array:
        """float32[B, F, V] below nodes of which the layers said y [B, F, D]; feature [B, D]."""
        x = jnp.concatenate([jnp.broadcast_to(feature[:, None], y.shape), y], -1)
        return by_depth(len(self.heads), depth, lambda i: self.heads[i].logits(x))


class ChimeraScratch(NamedTuple):
    memory: HeadMemory
    pending: kv.Pending  # of y, by place
    pair: Array  # int32[B, places, 2], the token before each node and its own


@functools.cache
def chimera_head(config: ChimeraConfig) -> Head:
    """The functions of a Chimera head. Memory: keys and values of the features, and the last feature."""
    module_of, layer = bind(Chimera, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, layer.width, batch, capacity)

    def read(params, held: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        features = pairs.features.astype(layer.dtype)
        keys = lambda step, cache: (features, module_of(params).layers(features, step, cache)[1])
        return memory.read(held, pairs, context, layer, keys)

    def start(params, held: HeadMemory, context: Context, places: int) -> tuple[ChimeraScratch, Array]:
        before = jnp.maximum(context.length[:, None] - jnp.array([3, 2]), 0)  # of the root's trigram
        before = take_along(context.tokens, before, 1)[:, None]
        pair = jnp.broadcast_to(before, (len(before), places, 2))
        scratch = ChimeraScratch(held, kv.empty_pending(held.cache, places), pair)
        scratch, logits = _follow(params, scratch, root_of(context, places), context, 0)
        return scratch, logits[:, 0]

    def follow(params, scratch: ChimeraScratch, drafted: DraftedNodes, context: Context) -> tuple[ChimeraScratch, Array]:
        return _follow(params, scratch, with_root(drafted), context, drafted.depth)

    def _follow(params, scratch: ChimeraScratch, drafted: DraftedNodes, context: Context, depth: Array | int):
        module, (cache, feature), tokens = module_of(params), scratch.memory, drafted.tokens
        positions = cache.length[:, None] + drafted.depth
        step = step_of(context, layer, cache, positions, among_drafted(drafted), scratch.pending)
        before = take_along(scratch.pair, drafted.parent[:, :, None], 1)
        y, _ = module.layers(module.embedded(before, tokens, positions, context), step, cache)
        _, new = module.layers(y, step, cache)  # nodes below see it in place of the trigram
        pair = jnp.stack([before[:, :, 1], tokens], 2)
        pair = batch_axes.insert(scratch.pair, pair, drafted.place)
        pending = kv.insert(scratch.pending, new, drafted.place)
        return ChimeraScratch(scratch.memory, pending, pair), module.logits(feature, y, depth)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind="chimera",
        config=config,
        max_depth=config.num_heads,
        axes=memory.axes,
        shardings=memory.shardings(layer),
    )


def of_target(target: LlamaConfig, *, num_heads: int = 4, **changes) -> ChimeraConfig:
    """The shapes that the authors train for a target: a layer like its own."""
    layer = target.draft_head_config(**changes)
    return ChimeraConfig(layer, target.vocab_size, num_heads)
