"""HAMburger: a small decoder writes the next few tokens from what the base says of the last ones, read as one.

Liu, Zhang: HAMburger: Accelerating LLM Inference via Token Smashing (2025), arXiv 2505.20438. Beside a base are

    merge   e_1, ..., e_s, embeddings of a segment, become mean(e) + W_o softmax(q . k / sqrt(h)) v, with q of mean(e),
            k and v of [e_i; p_i], p_i the embedding of a place; one token stays as it is
    micro   decoder layers over [z^1, ..., z^4; E y_1, E y_2, ...]: four streams of the base at the last token that it
            has read, and the tokens written since; at y_j it says y_{j+1}, by the base's head
    stop    an MLP on what the decoder says at y_j: how likely the segment ends there

As a head the base reads every token by itself, and nothing is merged: z is of the last token but the root, y_1 is the
root, what follows are drafts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import (
    among_drafted,
    bind,
    embed,
    empty_cache,
    newest,
    run_blocks,
    step_of,
    unembed,
    with_root,
)
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.heads.eagle import Layer
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, DraftOutput


@dataclass(frozen=True)
class HamburgerConfig:
    """Shapes of the three parts."""

    layer: LlamaConfig  # of the micro-step decoder; of the base's width
    taps: tuple[int, ...]  # streams of the base, 0 the embedding
    segment: int = 4  # tokens of a segment at most
    merge_heads: int = 64

    confidence = "stop"
    """Heads that say how sure they are have one (`specjax.training.objectives.head_objective`)."""


class Merge(nnx.Module):
    """A segment's embeddings as one. A new one gives their mean."""

    def __init__(self, config: HamburgerConfig, *, rngs: nnx.Rngs):
        c, width = config.layer, config.layer.width
        linear = functools.partial(L.Linear, bias=True, dtype=c.dtype, rngs=rngs)
        self.places = L.Embedding(config.segment, width // 2, dtype=c.dtype, rngs=rngs)
        self.q, self.o = linear(width, width), L.Linear(width, width, dtype=c.dtype, rngs=rngs)
        self.k, self.v = (linear(width + width // 2, width) for _ in range(2))
        self.o.weight[...] = jnp.zeros_like(self.o.weight[...])
        self.heads = config.merge_heads

    def __call__(self, embedded: Array, count: Array) -> Array:
        """[..., D] of the first `count` int32[...], one or more, of embeddings [..., s, D]."""
        size = embedded.shape[-2]
        there = jnp.arange(size) < count[..., None]
        mean = jnp.sum(embedded * there[..., None], -2) / count[..., None]
        places = jnp.broadcast_to(self.places(jnp.arange(size)), (*embedded.shape[:-1], embedded.shape[-1] // 2))
        each = jnp.concatenate([embedded, places], -1)
        heads = lambda x: x.reshape(*x.shape[:-1], self.heads, -1)
        q, k, v = heads(self.q(mean)), heads(self.k(each)), heads(self.v(each))
        score = jnp.einsum("...hd,...shd->...hs", q, k) * q.shape[-1] ** -0.5
        share = jax.nn.softmax(jnp.where(there[..., None, :], score, -jnp.inf), -1)
        found = jnp.einsum("...hs,...shd->...hd", share, v)
        merged = mean + self.o(found.reshape(mean.shape))
        return jnp.where(count[..., None] == 1, embedded[..., 0, :], merged).astype(embedded.dtype)


class Hamburger(nnx.Module):
    """The three parts."""

    def __init__(self, config: HamburgerConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.merge = Merge(config, rngs=rngs)
        self.stack = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        sizes = (c.width, c.width, 1)
        self.stop = nnx.List([L.Linear(c.width, size, bias=True, dtype=c.dtype, rngs=rngs) for size in sizes])

    def states(self, x: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        """[B, T, D] behind the last norm."""
        x, pending = run_blocks(self.stack, x.astype(self.config.layer.dtype), step, cache, self.config.layer)
        return self.norm(x), pending

    def stops(self, h: Array) -> Array:
        """float32[...]: the logit of the segment's end at a token, of states [..., D]."""
        first, second, last = self.stop
        return last(nnx.silu(second(nnx.silu(first(h)))))[..., 0].astype(jnp.float32)

    def said(self, h: Array, context: Context) -> DraftOutput:
        return DraftOutput(unembed(h, context), jax.nn.sigmoid(-self.stops(h)))


class HamburgerScratch(NamedTuple):
    pending: kv.Pending  # of the decoder: the streams, then by place, the root's behind them


@functools.cache
def hamburger_head(config: HamburgerConfig) -> Head:
    """The functions of the micro-step decoder. Memory: the base's streams at the last token that it read, [B, F]."""
    module_of, layer, count = bind(Hamburger, config), config.layer, len(config.taps)

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, count * layer.width), layer.dtype)

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return newest(pairs.features, pairs.count, last)

    def start(params, last: Array, context: Context, places: int) -> tuple[HamburgerScratch, DraftOutput]:
        module = module_of(params)
        h, pending = continued(module, last, context.root, context)
        return HamburgerScratch(kv.widen(pending, count + places)), module.said(h[:, 0], context)

    def follow(params, scratch: HamburgerScratch, drafted: DraftedNodes, context: Context) -> tuple[HamburgerScratch, DraftOutput]:
        module, tokens = module_of(params), drafted.tokens
        mask = jnp.pad(among_drafted(with_root(drafted)), ((0, 0), (0, 0), (count, 0)), constant_values=True)
        cache = empty_cache(context, layer, len(tokens), 0)
        step = step_of(context, layer, cache, count + drafted.depth, mask, scratch.pending)
        h, new = module.states(embed(None, tokens, context), step, cache)
        return HamburgerScratch(kv.insert(scratch.pending, new, count + drafted.place)), module.said(h, context)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind="hamburger",
        config=config,
        taps=config.taps,
        max_depth=config.segment - 1,
    )


def continued(module: Hamburger, last: Array, tokens: Array, context: Context) -> tuple[Array, kv.Pending]:
    """[B, T, D] of tokens int32[B, T], a segment or the beginning of one, behind the streams [B, F] of the base; and
    what is pending of both."""
    c, count = module.config.layer, len(module.config.taps)
    streams = last.reshape(len(last), count, c.width)
    x = jnp.concatenate([streams, embed(None, tokens, context).astype(streams.dtype)], 1)
    place = jnp.arange(x.shape[1])
    positions = jnp.broadcast_to(place, x.shape[:2])
    mask = jnp.broadcast_to(place <= place[:, None], (len(x), *[x.shape[1]] * 2))
    cache = empty_cache(context, c, len(x), 0)
    h, pending = module.states(x, step_of(context, c, cache, positions, mask), cache)
    return h[:, count:], pending


def of_target(target: LlamaConfig, *, num_layers: int = 4, segment: int = 4, **changes) -> HamburgerConfig:
    """The shapes that the authors train for a base: layers like its own, streams behind each quarter of it."""
    layer = target.draft_head_config(num_layers)
    taps = tuple(-(-target.num_layers * quarter // 4) for quarter in range(1, 5))
    heads = next(heads for heads in (64, 32, 16, 8, 4, 2, 1) if target.width % heads == 0)
    return HamburgerConfig(layer, taps, segment, **{"merge_heads": heads} | changes)
