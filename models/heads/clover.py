"""Clover and Clover-2: a recurrent chain of heads behind decoder layers that have read the token after the feature.

Xiao et al.: Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge (2024), arXiv 2405.00263;
Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding (2024), arXiv 2408.00264.
Clover-2, for u the target's stream before its final norm, and the gate
G(h, y) = h + concat_j cos((Q norm(h))_j, (K y)_j) (V y)_j over heads j:
h_0 = norm(layers(G_1(u, E root))), o_0 = norm'(M_1 h_0), for each drafted token x h_i = G_2(h_{i-1}, E x),
o_i = norm'(M_2 [h_i; E x]); logits = W_o o_i, by the target's head.

Clover's code was not published; it is read so: the layer reads u alone, h_0 = layer(u), and head i has parts of its
own, h_{i+1} = h_i + V_i attended, attention of h_i to the tokens from the root down, o_i = norm'_i(h +
SiLU(M_i h + b)), logits by the target's head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import Residual, by_depth, embed, run_blocks, unembed
from specjax.models.heads.contract import Head
from specjax.models.heads.eagle import Layer
from specjax.models.heads.recurrent import longer, recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class CloverConfig:
    """Shapes of Clover's heads. Published: num_heads and layer.num_layers are `num_heads`, `num_layers` of the config's
    block `clover`; taps is the last stream of the target, its number of layers.

    Parameters of Clover-2: embed `clover_embed_tokens`, gate and next_gate `clover_head_mlp_rnn` and `.._rnn2` with
    norm `input_layernorm`, stack[i] `layers.i`, norm `clover_norm`, head_norm `clover_head_norm`, first
    `clover_head_mlp`, next `clover_head_mlp2`.
    """

    layer: LlamaConfig  # of its layers, and num_heads of its gates
    taps: tuple[int, ...]
    num_heads: int = 5  # Clover drafts no further, Clover-2 was trained so far
    embeds: bool = True  # has a table of its own, a copy of the target's head; False: the target's embedding
    vocab_size: int = 0  # of that
    version: int = 2

    @property
    def said(self) -> int:
        return self.layer.width


class Gate(nnx.Module):
    """G. New ones give h."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        linear = lambda: L.Linear(c.width, c.width, bias=True, dtype=c.dtype, rngs=rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.q, self.k, self.v = linear(), linear(), linear()
        self.v.weight[...] = jnp.zeros_like(self.v.weight[...])
        self.num_heads, self.eps = c.num_heads, c.norm_eps

    def __call__(self, h: Array, embedded: Array) -> Array:
        heads = lambda x: x.astype(jnp.float32).reshape(*x.shape[:-1], self.num_heads, -1)
        unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), self.eps)
        q, k, v = heads(self.q(self.norm(h))), heads(self.k(embedded)), heads(self.v(embedded))
        gated = jnp.sum(unit(q) * unit(k), -1, keepdims=True) * v
        return h + gated.reshape(h.shape).astype(h.dtype)


class State(NamedTuple):
    h: Array  # [B, F, D]
    out: Array  # [B, F, D], M_1 h or M_2 [h; E x]


class Clover2(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule`."""

    def __init__(self, config: CloverConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        linear = lambda inputs: L.Linear(inputs * c.width, c.width, bias=True, dtype=c.dtype, rngs=rngs)
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        self.gate, self.next_gate = Gate(c, rngs), Gate(c, rngs)
        self.stack = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.head_norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.first, self.next = linear(1), linear(2)

    def embedded(self, tokens: Array, context: Context) -> Array:
        return embed(self.embed, tokens, context).astype(self.config.layer.dtype)

    def layers(
        self, features: Array, tokens: Array, context: Context, step: L.PassInputs, cache: kv.KVCache
    ) -> tuple[Array, kv.Pending]:
        x = self.gate(features, self.embedded(tokens, context))
        x, pending = run_blocks(list(self.stack), x, step, cache, self.config.layer)
        return self.norm(x), pending

    def at_root(self, said: Array, tokens: Array, context: Context) -> State:
        return State(said, self.first(said))  # the layers have read the root

    def below(self, state: State, tokens: Array, depth: Array, context: Context) -> State:
        embedded = self.embedded(tokens, context)
        h = self.next_gate(state.h, embedded)
        return State(h, self.next(jnp.concatenate([h, embedded], -1)))

    def logits(self, said: Array, state: State, depth: Array | int, context: Context) -> Array:
        return unembed(self.head_norm(state.out), context)


class Attend(nnx.Module):
    """Of one query to the embeddings of the tokens drafted so far, added to it. New ones add nothing."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        linear = lambda: L.Linear(c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.q, self.k, self.v, self.o = linear(), linear(), linear(), linear()
        self.o.weight[...] = jnp.zeros_like(self.o.weight[...])
        self.num_heads = c.num_heads

    def __call__(self, h: Array, embedded: Array) -> Array:
        """[B, F, D] of h [B, F, D] and K tokens each [B, F, K, D]."""
        heads = lambda x: x.reshape(*x.shape[:-1], self.num_heads, -1)
        q, k, v = heads(self.q(self.norm(h))), heads(self.k(embedded)), heads(self.v(embedded))
        scores = jnp.einsum("bfhd,bfkhd->bfhk", q, k) * q.shape[-1] ** -0.5
        attended = jnp.einsum("bfhk,bfkhd->bfhd", jax.nn.softmax(scores, -1), v)
        return h + self.o(attended.reshape(h.shape))


class Regression(nnx.Module):
    """One head of Clover."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.attend = Attend(c, rngs)
        self.block = Residual(c.width, dtype=c.dtype, rngs=rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)


class Path(NamedTuple):
    h: Array  # [B, F, D]
    tokens: Array  # int32[B, F, heads], from the root on


class Clover(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule`."""

    def __init__(self, config: CloverConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        self.stack = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers)])
        self.heads = nnx.List([Regression(c, rngs) for _ in range(config.num_heads)])

    def layers(
        self, features: Array, tokens: Array, context: Context, step: L.PassInputs, cache: kv.KVCache
    ) -> tuple[Array, kv.Pending]:
        return run_blocks(list(self.stack), features, step, cache, self.config.layer)

    def at_root(self, said: Array, tokens: Array, context: Context) -> Path:
        path = jnp.pad(tokens[:, :, None], ((0, 0), (0, 0), (0, self.config.num_heads - 1)))
        return Path(self._regressed(said, path, context, 0), path)

    def below(self, state: Path, tokens: Array, depth: Array, context: Context) -> Path:
        path = longer(state.tokens, tokens, depth)
        return Path(by_depth(len(self.heads), depth, lambda i: self._regressed(state.h, path, context, i)), path)

    def _regressed(self, h: Array, path: Array, context: Context, i: int) -> Array:
        embedded = embed(self.embed, path[:, :, : i + 1].reshape(len(path), -1), context).astype(h.dtype)
        return self.heads[i].attend(h, embedded.reshape(*path.shape[:2], i + 1, -1))

    def logits(self, said: Array, state: Path, depth: Array | int, context: Context) -> Array:
        out = by_depth(len(self.heads), depth, lambda i: self.heads[i].norm(self.heads[i].block(state.h)))
        return unembed(out, context)


def clover(config: CloverConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """The module of a config."""
    return (Clover if config.version == 1 else Clover2)(config, rngs=rngs)


def clover_head(config: CloverConfig) -> Head:
    """The functions of Clover's heads."""
    return recurrent("clover", clover, config, max_depth=config.num_heads if config.version == 1 else None)


def of_target(target: LlamaConfig, **changes) -> CloverConfig:
    """Clover-2 as the authors train it for a target: two layers like its own."""
    layer = target.draft_head_config(2)
    return dataclasses.replace(CloverConfig(layer, (target.num_layers,), vocab_size=target.vocab_size), **changes)
