"""HAMburger: a small decoder writes the next few tokens from the streams of a base model, until a segment ends.

Liu, Zhang: HAMburger: Accelerating LLM Inference via Token Smashing (2025), arXiv 2505.20438.

Rule: the base model gets three more parts.

    merge   replaces the embeddings e_1, ..., e_s of a segment by mean(e) + W_o softmax(q . k / sqrt(h)) v. q is
            computed from mean(e), k and v from [e_i; p_i] with position embeddings p_i. A single token is unchanged.
    micro   runs decoder layers over [z^1, ..., z^4; E y_1, E y_2, ...]: four streams of the base at the last token that
            it has read, and the tokens written since. At y_j it predicts y_{j+1} with the base's output layer.
    stop    is an MLP on the decoder's output at y_j, and predicts whether the segment ends there.

As a draft head, the base reads all tokens one at a time, without merging. z belongs to the token before the root,
y_1 is the root, and the next tokens are drafts. The draft stops where 1 - p_stop is below 0.9.
`specjax.decoders.hamburger` is the method without a verifier, where the base reads a segment as one token.
Guarantee: distribution (verified with the q that was sampled), of the target that reads tokens one at a time.
Deviations: the authors decode with the parts and do not verify. Verification is specjax's addition.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import (
    bind,
    check_taps,
    drafted_mask,
    embed,
    empty_cache,
    include_root,
    last_entry,
    pass_inputs,
    run_blocks,
    unembed,
)
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, HeadKind
from specjax.models.heads.eagle import Layer
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, DraftOutput

METHOD = Method(
    name="hamburger",
    summary="drafts with a small decoder over four of the target's hidden states, to the end of a segment",
    paper="Liu, Zhang 2025, arXiv 2505.20438",
    options=shared.head_options(stop="own:0.9"),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class HamburgerConfig:
    """Shapes of the three parts."""

    layer: LlamaConfig  # shape of the micro decoder's layers, as wide as the base
    taps: tuple[int, ...]  # streams of the base; 0: the embedding
    segment: int = 4  # maximum number of tokens in a segment
    merge_heads: int = 64

    confidence = "stop"
    """The name of the trained confidence (`specjax.training.objectives.head_objective`)."""


class Merge(nnx.Module):
    """Merges the embeddings of a segment into one. A new module returns their mean."""

    def __init__(self, config: HamburgerConfig, *, rngs: nnx.Rngs):
        c, width = config.layer, config.layer.width
        linear = functools.partial(L.Linear, bias=True, dtype=c.dtype, rngs=rngs)
        self.places = L.Embedding(config.segment, width // 2, dtype=c.dtype, rngs=rngs)
        self.q, self.o = linear(width, width), L.Linear(width, width, dtype=c.dtype, rngs=rngs)
        self.k, self.v = (linear(width + width // 2, width) for _ in range(2))
        self.o.weight[...] = jnp.zeros_like(self.o.weight[...])
        self.heads = config.merge_heads

    def __call__(self, embedded: Array, count: Array) -> Array:
        """Return [..., D] for the first `count` int32[...] >= 1 of embeddings [..., s, D]."""
        size = embedded.shape[-2]
        is_valid = jnp.arange(size) < count[..., None]
        mean = jnp.sum(embedded * is_valid[..., None], -2) / count[..., None]
        places = jnp.broadcast_to(self.places(jnp.arange(size)), (*embedded.shape[:-1], embedded.shape[-1] // 2))
        each = jnp.concatenate([embedded, places], -1)
        heads = lambda x: x.reshape(*x.shape[:-1], self.heads, -1)
        q, k, v = heads(self.q(mean)), heads(self.k(each)), heads(self.v(each))
        score = jnp.einsum("...hd,...shd->...hs", q, k) * q.shape[-1] ** -0.5
        share = jax.nn.softmax(jnp.where(is_valid[..., None, :], score, -jnp.inf), -1)
        attended = jnp.einsum("...hs,...shd->...hd", share, v)
        merged = mean + self.o(attended.reshape(mean.shape))
        return jnp.where(count[..., None] == 1, embedded[..., 0, :], merged).astype(embedded.dtype)


class Hamburger(nnx.Module):
    """The three parts of the method."""

    def __init__(self, config: HamburgerConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.merge = Merge(config, rngs=rngs)
        self.stack = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        sizes = (c.width, c.width, 1)
        self.stop = nnx.List([L.Linear(c.width, size, bias=True, dtype=c.dtype, rngs=rngs) for size in sizes])

    def states(self, x: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        """Return the outputs [B, T, D] after the last norm, and the cache entries."""
        x, pending = run_blocks(self.stack, x.astype(self.config.layer.dtype), step, cache, self.config.layer)
        return self.norm(x), pending

    def stops(self, h: Array) -> Array:
        """Return the logits float32[...] of the segment's end, from states [..., D]."""
        first, second, last = self.stop
        return last(nnx.silu(second(nnx.silu(first(h)))))[..., 0].astype(jnp.float32)

    def output(self, h: Array, context: Context) -> DraftOutput:
        """Return the logits and the confidence of states [..., D]."""
        return DraftOutput(unembed(h, context), jax.nn.sigmoid(-self.stops(h)))


class HamburgerScratch(NamedTuple):
    """The drafted nodes of one step."""

    pending: kv.Pending  # of the decoder: the streams, then the nodes by place, root included


@functools.cache
def hamburger_head(config: HamburgerConfig) -> Head:
    """Return the functions of the micro decoder. Its memory stores the base's streams [B, F] at the last token."""
    module_of, layer, count = bind(Hamburger, config), config.layer, len(config.taps)

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, count * layer.width), layer.dtype)

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return last_entry(pairs.features, pairs.count, last)

    def start(params, last: Array, context: Context, places: int) -> tuple[HamburgerScratch, DraftOutput]:
        module = module_of(params)
        h, pending = decode_segment(module, last, context.root, context)
        return HamburgerScratch(kv.widen(pending, count + places)), module.output(h[:, 0], context)

    def follow(
        params, scratch: HamburgerScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[HamburgerScratch, DraftOutput]:
        module, tokens = module_of(params), drafted.tokens
        mask = jnp.pad(drafted_mask(include_root(drafted)), ((0, 0), (0, 0), (count, 0)), constant_values=True)
        cache = empty_cache(context, layer, len(tokens), 0)
        step = pass_inputs(context, layer, cache, count + drafted.depth, mask, scratch.pending)
        h, new = module.states(embed(None, tokens, context), step, cache)
        return HamburgerScratch(kv.insert(scratch.pending, new, count + drafted.place)), module.output(h, context)

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


def decode_segment(module: Hamburger, last: Array, tokens: Array, context: Context) -> tuple[Array, kv.Pending]:
    """Run the micro decoder over the streams [B, F] of the base and the tokens int32[B, T] of a segment so far.

    Return the outputs [B, T, D] at the tokens, and the pending cache entries of streams and tokens.
    """
    c, count = module.config.layer, len(module.config.taps)
    streams = last.reshape(len(last), count, c.width)
    x = jnp.concatenate([streams, embed(None, tokens, context).astype(streams.dtype)], 1)
    place = jnp.arange(x.shape[1])
    positions = jnp.broadcast_to(place, x.shape[:2])
    mask = jnp.broadcast_to(place <= place[:, None], (len(x), *[x.shape[1]] * 2))
    cache = empty_cache(context, c, len(x), 0)
    h, pending = module.states(x, pass_inputs(context, c, cache, positions, mask), cache)
    return h[:, count:], pending


def of_target(target: LlamaConfig, *, num_layers: int = 4, segment: int = 4, **changes) -> HamburgerConfig:
    """Return the shapes that the authors train for a base: layers like the base's, and a stream after each quarter."""
    layer = target.draft_head_config(num_layers)
    taps = check_taps(target, None, tuple(-(-target.num_layers * quarter // 4) for quarter in range(1, 5)))
    heads = next(heads for heads in (64, 32, 16, 8, 4, 2, 1) if target.width % heads == 0)
    return HamburgerConfig(layer, taps, segment, **{"merge_heads": heads} | changes)


KIND = HeadKind(METHOD, Hamburger, hamburger_head, of_target, ("num_layers", "segment"))
