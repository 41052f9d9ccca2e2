"""Falcon: one pass of a decoder layer says the next k features, not one.

Gao, Xie, Xiang, Ji: Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive
Drafting and Custom-Designed Decoding Tree (AAAI 2025), arXiv 2412.12639. z_t = LSTM([E x_{t+1}; f_t]); in the layer a
block of k rows sees all before it and all of itself; f^_{t+k} = layer(z)_t, and W_o applies to it as to EAGLE's.

With k = 2, a draft of a, b, c, d behind the root r at n-1:

    row       n-3         n-2        n-1        n
    pair   (f_{n-3},..) (f_{n-2},r)  (f^_{n-1},a) (f^_n,b)
    says    f^_{n-1}     f^_n       f^_{n+1}   f^_{n+2}
    token      a           b          c          d

So the tokens of one block do not know of each other, and those of the next know them all. In a single layer, keys and
values do not depend on what the rows before them saw: the first block is the last k pairs of the text, however long it
is, and only their queries are asked again.
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
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.blocks import bind, embed, run_blocks, step_of, unembed
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.heads.eagle import Layer
from specjax.models.heads.lstm import LSTM
from specjax.models.heads.memory import HeadMemory
from specjax.models.heads.recurrent import at_places, longer
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class FalconConfig:
    """Shapes of a Falcon head. Published keys: block_size `k_mask`, bias `bias`."""

    layer: LlamaConfig  # one; of the target's width
    block_size: int = 2  # k
    lstm_layers: int = 2  # 0: EAGLE's fc in their place
    carries: bool = False  # the LSTM reads the text; else each pair for itself, as the authors' code does
    bias: bool = True  # of the LSTM
    embeds: bool = False  # has an embedding of its own, in place of the target's
    vocab_size: int = 0  # of the target
    taps: tuple[int, ...] = ()

    @property
    def states(self) -> int:
        """Vectors that the LSTM carries."""
        return 2 * self.lstm_layers if self.carries else 0

    @property
    def said(self) -> int:
        return (self.block_size + self.states) * self.layer.width


class Falcon(nnx.Module):
    """What joins a pair, and the layer."""

    def __init__(self, config: FalconConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        shapes: dict[str, Any] = {"bias": config.bias, "dtype": c.dtype, "rngs": rngs}
        lstm = lambda: LSTM(2 * c.width, c.width, config.lstm_layers, carries=config.carries, **shapes)
        self.lstm = lstm() if config.lstm_layers else None
        self.fc = None if config.lstm_layers else L.Linear(2 * c.width, c.width, **shapes)
        self.stack = nnx.List([Layer(c, has_norm=False, rngs=rngs)])

    def joined(self, features: Array, tokens: Array, state: Array, context: Context) -> tuple[Array, Array]:
        """(z [.., T, D], states [.., T, S, D]) of pairs, from the LSTM's state [.., S, D] before them."""
        embedded = embed(self.embed, tokens.reshape(len(tokens), -1), context).reshape(features.shape)
        x = jnp.concatenate([embedded.astype(features.dtype), features], -1)
        if self.lstm is None:
            assert self.fc is not None
            return self.fc(x), jnp.zeros((*features.shape[:-1], *state.shape[-2:]), x.dtype)
        return self.lstm(x, state)

    def layers(self, z: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        return run_blocks(list(self.stack), z, step, cache, self.config.layer)


class FalconNodes(NamedTuple):
    """Of the drafted nodes, by place."""

    tokens: Array  # int32[B, places, k], of the block that a node stands in, as far as the node
    said: Array  # [B, places, k, D], the features below a node: of its block, or where it ends one, of the next
    state: Array  # [B, places, S, D], the LSTM's behind the last whole block
    ends: Array  # bool[B, places], whether it ends a block


class FalconScratch(NamedTuple):
    cache: kv.KVCache
    pending: kv.Pending  # k rows a place, of nodes that end a block
    nodes: FalconNodes


@functools.cache
def falcon_head(config: FalconConfig) -> Head:
    """The functions of a Falcon head. Memory: its layer's keys and values, z of the last k pairs, the LSTM's state.

    Raises: UsageError for more layers than one, or blocks of no token.
    """
    if config.block_size < 1:
        raise UsageError(f"block_size must be at least 1, not {config.block_size}")
    if config.layer.num_layers != 1:
        raise UsageError(
            f"a Falcon head has one decoder layer, not {config.layer.num_layers}: the keys of a second one depend on "
            "where the blocks of the text begin"
        )
    module_of, layer, k, width = bind(Falcon, config), config.layer, config.block_size, config.layer.width

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, config.said, batch, capacity)

    def parts(last: Array) -> tuple[Array, Array]:
        """(z [B, k, D] of the last k pairs, the LSTM's state [B, S, D])."""
        recent, state = jnp.split(last.reshape(len(last), -1, width), [k], 1)
        return recent, state

    def read(params, held: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        module, (recent, state), size = module_of(params), parts(held.last), pairs.tokens.shape[1]
        z, states = module.joined(pairs.features.astype(layer.dtype), pairs.tokens, state, context)
        line = jnp.concatenate([recent, z], 1)
        last = [line[:, 1 + j : 1 + j + size, None] for j in range(k)]  # the k pairs up to each
        said = jnp.concatenate([*last, states], 2).reshape(*pairs.tokens.shape, -1)
        return memory.read(held, pairs, context, layer, lambda step, cache: (said, module.layers(z, step, cache)[1]))

    def start(params, held: HeadMemory, context: Context, places: int) -> tuple[FalconScratch, Array]:
        cache, (z, state) = held.cache, parts(held.last)
        positions = cache.length[:, None] - k + jnp.arange(k, dtype=jnp.int32)
        # They are in the cache, which all of them see; pairs that a short text lacks see themselves as well.
        mask = jnp.eye(k, dtype=bool) & (positions < 0)[:, :, None]
        said, _ = module_of(params).layers(z, step_of(context, layer, cache, positions, mask), cache)
        none = jnp.zeros((len(said), 1, k), jnp.int32)
        nodes = FalconNodes(none, said[:, None], state[:, None], jnp.zeros((len(said), 1), bool))
        scratch = FalconScratch(cache, kv.empty_pending(cache, places * k), batch_axes.widen(nodes, places))
        return scratch, unembed(said[:, 0], context)

    def follow(params, scratch: FalconScratch, drafted: DraftedNodes, context: Context) -> tuple[FalconScratch, Array]:
        nodes, depth = scratch.nodes, drafted.depth
        above = jax.tree.map(lambda x: at_places(x, drafted.parent), nodes)
        tokens, ends = longer(above.tokens, drafted.tokens, (depth - 1) % k), depth % k == 0
        whole = lambda: next_block(params, scratch, drafted, above._replace(tokens=tokens), context)
        said, state, pending = jax.lax.cond(jnp.any(ends), whole, lambda: (above.said, above.state, scratch.pending))
        choose = lambda new, old: jnp.where(ends[:, :, None, None], new, old)
        new = FalconNodes(tokens, choose(said, above.said), choose(state, above.state), ends)
        here = take_along(new.said, (depth % k)[:, :, None, None], 2)[:, :, 0]
        return FalconScratch(scratch.cache, pending, batch_axes.insert(nodes, new, drafted.place)), unembed(here, context)

    def next_block(params, scratch: FalconScratch, drafted: DraftedNodes, nodes: FalconNodes, context: Context):
        """(said [B, F, k, D], state [B, F, S, D], all that is pending) of drafted nodes as the ends of blocks."""
        module, (batch, count), cache = module_of(params), drafted.tokens.shape, scratch.cache
        z, states = module.joined(nodes.said, nodes.tokens, nodes.state, context)
        # The pair of the root is the last in the cache, at length - 1; a node of depth d stands d behind it.
        positions = cache.length[:, None, None] + drafted.depth[:, :, None] - k + jnp.arange(k, dtype=jnp.int32)
        by_row = lambda x: jnp.repeat(x, k, axis=-1)
        seen = by_row(drafted.seen & scratch.nodes.ends[:, None])  # [B, F, places k]
        own = jnp.broadcast_to(by_row(jnp.eye(count, dtype=bool)), (batch, count, count * k))
        mask = jnp.repeat(jnp.concatenate([seen, own], 2), k, axis=1)
        rows = lambda x: x.reshape(batch, count * k, *x.shape[3:])
        step = step_of(context, layer, cache, rows(positions), mask, scratch.pending)
        said, new = module.layers(rows(z), step, cache)
        pending = kv.insert(scratch.pending, new, drafted.place * k)
        return said.reshape(z.shape), states[:, :, -1], pending

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind="falcon",
        config=config,
        taps=config.taps,
        levels_per_pass=k,
        feature=lambda scratch, place: scratch.nodes.said[:, place, place % k],
        axes=memory.axes,
        shardings=memory.shardings(layer),
    )


def of_target(target: LlamaConfig, *, block_size: int = 2, **changes) -> FalconConfig:
    """The shapes that the authors train for a target: a layer like its own, k = 2."""
    layer = target.draft_head_config()
    return FalconConfig(layer, block_size, **changes)
