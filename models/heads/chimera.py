"""Chimera: a decoder layer over the target's features, with trigrams in place of the features that are still unknown.

Zeng et al.: Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all Tokens
(2024), arXiv 2402.15758.

Rule: g_i = T(c + SiLU(W c + b)) for c = [E x_{i-2}; E x_{i-1}; E x_i]. The layer reads

    position   0   1   ...  n-2      n-1      n        n+1
    input     f_0 f_1  ... f_{n-2}   g_root
    then                             y_root   g_1
    then                             y_root   y_1      g_2

where y is the layer's output for the trigram that it replaces; logits_i = W_i [f_{n-2}; y] predict draft i + 1. The
authors draft EAGLE-1's static tree.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the accepted tokens are read with true features at the start of the next draft, in one pass.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.catalog import Method, shared
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.blocks import (
    Residual,
    bind,
    by_depth,
    drafted_mask,
    embed,
    include_root,
    pass_inputs,
    root_node,
    run_blocks,
)
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, HeadKind
from specjax.models.heads.eagle import Layer
from specjax.models.heads.memory import HeadMemory
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="chimera",
    summary="drafts with one decoder layer; a code of three tokens replaces each hidden state not computed yet",
    paper="Zeng et al. 2024, arXiv 2402.15758",
    options=shared.head_options(),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class ChimeraConfig:
    """Shapes of a Chimera head. The published config calls num_heads `chimera_num_heads`."""

    layer: LlamaConfig  # shape of its layers, as wide as the target
    vocab_size: int
    num_heads: int
    taps: tuple[int, ...] = ()


class Chimera(nnx.Module):
    """The trigram network, the layers and the output layers."""

    def __init__(self, config: ChimeraConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.trigram = Residual(3 * c.width, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(3 * c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.stack = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers)])
        head = lambda: L.Embedding(config.vocab_size, 2 * c.width, dtype=c.dtype, rngs=rngs)
        self.heads = nnx.List([head() for _ in range(config.num_heads)])

    def layers(self, x: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        return run_blocks(list(self.stack), x, step, cache, self.config.layer)

    def embedded(self, previous: Array, tokens: Array, position: Array, context: Context) -> Array:
        """Return g [B, F, D] for tokens int32[B, F] at `position`, each with two `previous` tokens int32[B, F, 2]."""
        two, one = previous[:, :, 0], previous[:, :, 1]
        # At the start of a text the authors use the trigrams (x_0, x_0, x_0) and (x_0, x_1, x_1).
        two = jnp.where(position > 1, two, jnp.where(position == 1, one, tokens))
        one = jnp.where(position > 1, one, tokens)
        three = jnp.stack([two, one, tokens], 2).reshape(len(tokens), -1)
        x = embed(None, three, context).astype(self.config.layer.dtype)
        return self.down(self.trigram(x.reshape(*tokens.shape, -1)))

    def logits(self, feature: Array, y: Array, depth: Array | int) -> Array:
        """Return the logits float32[B, F, V] after nodes with layer outputs y [B, F, D], for the feature [B, D]."""
        x = jnp.concatenate([jnp.broadcast_to(feature[:, None], y.shape), y], -1)
        return by_depth(len(self.heads), depth, lambda i: self.heads[i].logits(x))


class ChimeraScratch(NamedTuple):
    """The drafted nodes of one step."""

    memory: HeadMemory
    pending: kv.Pending  # of the outputs y, by place
    pair: Array  # int32[B, places, 2], the tokens of each node's parent and of the node


@functools.cache
def chimera_head(config: ChimeraConfig) -> Head:
    """Return the functions of a Chimera head. Its memory stores the features' keys and values, and the last feature."""
    module_of, layer = bind(Chimera, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, layer.width, batch, capacity)

    def read(params, state: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        features = pairs.features.astype(layer.dtype)
        keys = lambda step, cache: (features, module_of(params).layers(features, step, cache)[1])
        return memory.read(state, pairs, context, layer, keys)

    def start(params, state: HeadMemory, context: Context, places: int) -> tuple[ChimeraScratch, Array]:
        index = jnp.maximum(context.length[:, None] - jnp.array([3, 2]), 0)  # of the root's trigram
        previous = take_along(context.tokens, index, 1)[:, None]
        pair = jnp.broadcast_to(previous, (len(previous), places, 2))
        scratch = ChimeraScratch(state, kv.empty_pending(state.cache, places), pair)
        scratch, logits = _follow(params, scratch, root_node(context, places), context, 0)
        return scratch, logits[:, 0]

    def follow(
        params, scratch: ChimeraScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[ChimeraScratch, Array]:
        return _follow(params, scratch, include_root(drafted), context, drafted.depth)

    def _follow(params, scratch: ChimeraScratch, drafted: DraftedNodes, context: Context, depth: Array | int):
        module, (cache, feature, _), tokens = module_of(params), scratch.memory, drafted.tokens
        positions = cache.length[:, None] + drafted.depth
        step = pass_inputs(context, layer, cache, positions, drafted_mask(drafted), scratch.pending)
        previous = take_along(scratch.pair, drafted.parent[:, :, None], 1)
        y, _ = module.layers(module.embedded(previous, tokens, positions, context), step, cache)
        _, new = module.layers(y, step, cache)  # descendants attend to y instead of the trigram
        pair = jnp.stack([previous[:, :, 1], tokens], 2)
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
    """Return the shapes that the authors train for a target: one layer like the target's."""
    layer = target.draft_head_config(**changes)
    return ChimeraConfig(layer, target.vocab_size, num_heads)


KIND = HeadKind(METHOD, Chimera, chimera_head, of_target, ("num_heads",))
