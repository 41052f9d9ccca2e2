"""Falcon: one pass of a decoder layer predicts the next k features instead of one.

Gao, Xie, Xiang, Ji: Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive
Drafting and Custom-Designed Decoding Tree (AAAI 2025), arXiv 2412.12639.

Rule: z_t = LSTM([E x_{t+1}; f_t]). In the layer, a block of k rows attends to all rows before it and to itself.
f^_{t+k} = layer(z)_t, and W_o applies to it as in EAGLE. With k = 2, a draft of a, b, c, d after the root r at n-1:

    row          n-3          n-2         n-1         n
    pair      (f_{n-3},..) (f_{n-2},r) (f^_{n-1},a) (f^_n,b)
    predicts   f^_{n-1}     f^_n        f^_{n+1}    f^_{n+2}
    token         a           b            c           d

So the tokens of one block are independent of each other, and those of the next block depend on all of them. In a single
layer, keys and values do not depend on the attention of earlier rows. So the first block is always the last k pairs
of the text, and only their queries are computed again. Once a path of the tree fills a block, the next block is drafted
for it.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q, the head's
distribution after the blocks above).
Deviations: the authors' code runs the LSTM over the batch, so it reads each pair of a text alone. This code does the
same. With `FalconConfig.carries` the LSTM carries a state along the text, for heads that were trained that way. It then
reads a prompt token by token, and its weights once per token. Trees are any trees of tokens, not the authors' trees of
whole blocks.
The accepted tokens are read with true features at the start of the next draft. The draft for a text shorter than k + 1
tokens depends in part on empty pairs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.blocks import bind, embed, pass_inputs, run_blocks, unembed
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, HeadKind
from specjax.models.heads.eagle import Layer
from specjax.models.heads.lstm import LSTM
from specjax.models.heads.memory import HeadMemory
from specjax.models.heads.recurrent import extend_path, gather_places
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="falcon",
    summary="drafts k tokens per pass with a decoder layer that predicts the target's next k hidden states",
    paper="Gao et al. 2024, arXiv 2412.12639",
    options=shared.head_options(length=4),
    cpu_options={"num_tokens": 4},
    wide_tree="eagle2:8x6x60",
    **shared.HEAD,
)


@dataclass(frozen=True)
class FalconConfig:
    """Shapes of a Falcon head. The published config calls block_size `k_mask`."""

    layer: LlamaConfig  # shape of its single layer, as wide as the target
    block_size: int = 2  # k
    lstm_layers: int = 2  # 0: EAGLE's fc instead
    carries: bool = False  # the LSTM carries a state along the text; False: it reads each pair alone, as published
    bias: bool = True  # bias of the LSTM
    embeds: bool = False  # has its own embedding; False: the target's
    vocab_size: int = 0  # of the target
    taps: tuple[int, ...] = ()

    @property
    def states(self) -> int:
        """Return the number of vectors that the LSTM carries."""
        return 2 * self.lstm_layers if self.carries else 0

    @property
    def output_width(self) -> int:
        return (self.block_size + self.states) * self.layer.width


class Falcon(nnx.Module):
    """The LSTM that combines a pair, and the layer."""

    def __init__(self, config: FalconConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        shapes: dict[str, Any] = {"bias": config.bias, "dtype": c.dtype, "rngs": rngs}
        lstm = lambda: LSTM(2 * c.width, c.width, config.lstm_layers, carries=config.carries, **shapes)
        self.lstm = lstm() if config.lstm_layers else None
        self.fc = None if config.lstm_layers else L.Linear(2 * c.width, c.width, **shapes)
        self.stack = nnx.List([Layer(c, has_norm=False, rngs=rngs)])

    def combine(self, features: Array, tokens: Array, state: Array, context: Context) -> tuple[Array, Array]:
        """Return z [.., T, D] and the LSTM's states [.., T, S, D] of pairs, from its state [.., S, D] before them."""
        embedded = embed(self.embed, tokens.reshape(len(tokens), -1), context).reshape(features.shape)
        x = jnp.concatenate([embedded.astype(features.dtype), features], -1)
        if self.lstm is None:
            assert self.fc is not None
            return self.fc(x), jnp.zeros((*features.shape[:-1], *state.shape[-2:]), x.dtype)
        return self.lstm(x, state)

    def layers(self, z: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        return run_blocks(list(self.stack), z, step, cache, self.config.layer)


class FalconNodes(NamedTuple):
    """The drafted nodes by place."""

    tokens: Array  # int32[B, places, k], the tokens of the node's block up to the node
    features: Array  # [B, places, k, D], predicted features of the node's block; of the next block if the node ends one
    state: Array  # [B, places, S, D], the LSTM's state after the last complete block
    ends: Array  # bool[B, places], True: the node ends a block


class FalconScratch(NamedTuple):
    """The drafted nodes of one step and their keys and values."""

    cache: kv.KVCache
    pending: kv.Pending  # k rows per place, for nodes that end a block
    nodes: FalconNodes


@functools.cache
def falcon_head(config: FalconConfig) -> Head:
    """Return the functions of a Falcon head.

    Its memory stores the keys and values of its layer, z of the last k pairs, and the state of the LSTM.

    Raises: UsageError for more than one layer, or a block size below 1.
    """
    if config.block_size < 1:
        raise UsageError(f"block_size must be at least 1, not {config.block_size}")
    if config.layer.num_layers != 1:
        raise UsageError(
            f"a Falcon head has one decoder layer, not {config.layer.num_layers}; the keys of a second layer would "
            "depend on the starts of blocks in the text"
        )
    module_of, layer, k, width = bind(Falcon, config), config.layer, config.block_size, config.layer.width

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, config.output_width, batch, capacity)

    def parts(last: Array) -> tuple[Array, Array]:
        """Return z [B, k, D] of the last k pairs and the LSTM's state [B, S, D]."""
        recent, state = jnp.split(last.reshape(len(last), -1, width), [k], 1)
        return recent, state

    def read(params, state: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        module, (recent, lstm_state), size = module_of(params), parts(state.last), pairs.tokens.shape[1]
        z, states = module.combine(pairs.features.astype(layer.dtype), pairs.tokens, lstm_state, context)
        rows = jnp.concatenate([recent, z], 1)
        last = [rows[:, 1 + j : 1 + j + size, None] for j in range(k)]  # the k pairs up to each one
        outputs = jnp.concatenate([*last, states], 2).reshape(*pairs.tokens.shape, -1)
        layers = lambda step, cache: (outputs, module.layers(z, step, cache)[1])
        return memory.read(state, pairs, context, layer, layers)

    def start(params, state: HeadMemory, context: Context, places: int) -> tuple[FalconScratch, Array]:
        cache, (z, lstm_state) = state.cache, parts(state.last)
        positions = cache.length[:, None] - k + jnp.arange(k, dtype=jnp.int32)
        # The pairs are in the cache, and all of them attend to it. Pairs that a short text lacks attend to themselves.
        mask = jnp.eye(k, dtype=bool) & (positions < 0)[:, :, None]
        features, _ = module_of(params).layers(z, pass_inputs(context, layer, cache, positions, mask), cache)
        tokens = jnp.zeros((len(features), 1, k), jnp.int32)
        nodes = FalconNodes(tokens, features[:, None], lstm_state[:, None], jnp.zeros((len(features), 1), bool))
        scratch = FalconScratch(cache, kv.empty_pending(cache, places * k), batch_axes.widen(nodes, places))
        return scratch, unembed(features[:, 0], context)

    def follow(params, scratch: FalconScratch, drafted: DraftedNodes, context: Context) -> tuple[FalconScratch, Array]:
        nodes, depth = scratch.nodes, drafted.depth
        parents = jax.tree.map(lambda x: gather_places(x, drafted.parent), nodes)
        tokens, ends = extend_path(parents.tokens, drafted.tokens, (depth - 1) % k), depth % k == 0
        draft_block = lambda: next_block(params, scratch, drafted, parents._replace(tokens=tokens), context)
        unchanged = lambda: (parents.features, parents.state, scratch.pending)
        features, state, pending = jax.lax.cond(jnp.any(ends), draft_block, unchanged)
        choose = lambda new, old: jnp.where(ends[:, :, None, None], new, old)
        new = FalconNodes(tokens, choose(features, parents.features), choose(state, parents.state), ends)
        feature = take_along(new.features, (depth % k)[:, :, None, None], 2)[:, :, 0]
        scratch = FalconScratch(scratch.cache, pending, batch_axes.insert(nodes, new, drafted.place))
        return scratch, unembed(feature, context)

    def next_block(params, scratch: FalconScratch, drafted: DraftedNodes, nodes: FalconNodes, context: Context):
        """Draft the blocks after nodes: features [B, F, k, D], LSTM states [B, F, S, D] and pending entries."""
        module, (batch, count), cache = module_of(params), drafted.tokens.shape, scratch.cache
        z, states = module.combine(nodes.features, nodes.tokens, nodes.state, context)
        # The pair of the root is the last one in the cache, at length - 1. A node of depth d is d positions after it.
        positions = cache.length[:, None, None] + drafted.depth[:, :, None] - k + jnp.arange(k, dtype=jnp.int32)
        by_row = lambda x: jnp.repeat(x, k, axis=-1)
        ancestors = by_row(drafted.seen & scratch.nodes.ends[:, None])  # [B, F, places k]
        itself = jnp.broadcast_to(by_row(jnp.eye(count, dtype=bool)), (batch, count, count * k))
        mask = jnp.repeat(jnp.concatenate([ancestors, itself], 2), k, axis=1)
        rows = lambda x: x.reshape(batch, count * k, *x.shape[3:])
        step = pass_inputs(context, layer, cache, rows(positions), mask, scratch.pending)
        features, new = module.layers(rows(z), step, cache)
        pending = kv.insert(scratch.pending, new, drafted.place * k)
        return features.reshape(z.shape), states[:, :, -1], pending

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind="falcon",
        config=config,
        taps=config.taps,
        levels_per_pass=k,
        feature=lambda scratch, place: scratch.nodes.features[:, place, place % k],
        axes=memory.axes,
        shardings=memory.shardings(layer),
    )


def of_target(target: LlamaConfig, *, block_size: int = 2, **changes) -> FalconConfig:
    """Return the shapes that the authors train for a target: one layer like the target's, k = 2."""
    layer = target.draft_head_config()
    return FalconConfig(layer, block_size, **changes)


KIND = HeadKind(METHOD, Falcon, falcon_head, of_target, ("block_size",))
