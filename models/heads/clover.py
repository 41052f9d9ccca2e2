"""Clover and Clover-2: a recurrent chain of heads after decoder layers that have read the token after the feature.

Xiao et al.: Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge (2024), arXiv 2405.00263;
Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding (2024), arXiv 2408.00264.

Rule of Clover-2: u is the target's stream before its final norm. The gate over attention heads j is
  G(h, y) = h + concat_j cos((Q norm(h))_j, (K y)_j) (V y)_j.
  Root: h_0 = norm(layers(G_1(u, E root))), o_0 = norm'(M_1 h_0).
  Each drafted token x: h_i = G_2(h_{i-1}, E x), o_i = norm'(M_2 [h_i; E x]).
  logits = W_o o_i with the target's output layer W_o.
  The layers read each accepted token once; drafted tokens pass only the gate. The authors draft EAGLE-1's static tree.
Rule of Clover: its code was not published, so this is our interpretation. The layer reads u alone, h_0 = layer(u), and
  head i has its own parameters: h_{i+1} = h_i + V_i attention(h_i to the tokens from the root down),
  o_i = norm'_i(h + SiLU(M_i h + b)); the output layer is the target's.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: any tree of `specjax.trees`. Clover's own tree keeps the most likely children of a node up to
a mass of 0.95.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import Residual, by_depth, embed, run_blocks, unembed
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.eagle import Layer
from specjax.models.heads.recurrent import extend_path, recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="clover",
    summary="drafts with a recurrent network that starts from decoder layers over the target's hidden states",
    paper="Xiao et al. 2024, arXiv 2405.00263 and 2408.00264",
    options=shared.head_options(length=5),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class CloverConfig:
    """Shapes of Clover's heads. The published config has num_heads and the number of layers in its block `clover`."""

    layer: LlamaConfig  # shape of its layers; num_heads is also that of the gates
    taps: tuple[int, ...]  # the last stream of the target
    num_heads: int = 5  # the longest draft of Clover, and the draft length in the training of Clover-2
    embeds: bool = True  # has its own table, a copy of the target's output layer; False: the target's embedding
    vocab_size: int = 0  # of its own table
    version: int = 2

    @property
    def output_width(self) -> int:
        return self.layer.width


class Gate(nnx.Module):
    """The gate G. A new gate returns h."""

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


class CloverState(NamedTuple):
    """The state of drafted tokens."""

    h: Array  # [B, F, D]
    out: Array  # [B, F, D], M_1 h or M_2 [h; E x]


class Clover2(nnx.Module):
    """The module of Clover-2, a `specjax.models.heads.recurrent.RecurrentModule`."""

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

    def at_root(self, outputs: Array, tokens: Array, context: Context) -> CloverState:
        return CloverState(outputs, self.first(outputs))  # the layers have read the root

    def below(self, state: CloverState, tokens: Array, depth: Array, context: Context) -> CloverState:
        embedded = self.embedded(tokens, context)
        h = self.next_gate(state.h, embedded)
        return CloverState(h, self.next(jnp.concatenate([h, embedded], -1)))

    def logits(self, outputs: Array, state: CloverState, depth: Array | int, context: Context) -> Array:
        return unembed(self.head_norm(state.out), context)


class Attend(nnx.Module):
    """Attention of one query to the embeddings of the tokens drafted so far. A new module returns the query."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        linear = lambda: L.Linear(c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.q, self.k, self.v, self.o = linear(), linear(), linear(), linear()
        self.o.weight[...] = jnp.zeros_like(self.o.weight[...])
        self.num_heads = c.num_heads

    def __call__(self, h: Array, embedded: Array) -> Array:
        """Return [B, F, D] from h [B, F, D] and the embeddings [B, F, K, D] of K tokens for each."""
        heads = lambda x: x.reshape(*x.shape[:-1], self.num_heads, -1)
        q, k, v = heads(self.q(self.norm(h))), heads(self.k(embedded)), heads(self.v(embedded))
        scores = jnp.einsum("bfhd,bfkhd->bfhk", q, k) * q.shape[-1] ** -0.5
        attended = jnp.einsum("bfhk,bfkhd->bfhd", jax.nn.softmax(scores, -1), v)
        return h + self.o(attended.reshape(h.shape))


class Regression(nnx.Module):
    """A head of Clover, with its attention, block and norm."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.attend = Attend(c, rngs)
        self.block = Residual(c.width, dtype=c.dtype, rngs=rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)


class CloverPath(NamedTuple):
    """The state of drafted tokens, with the path from the root to each."""

    h: Array  # [B, F, D]
    tokens: Array  # int32[B, F, heads], from the root down


class Clover(nnx.Module):
    """The module of Clover, a `specjax.models.heads.recurrent.RecurrentModule`."""

    def __init__(self, config: CloverConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        self.stack = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers)])
        self.heads = nnx.List([Regression(c, rngs) for _ in range(config.num_heads)])

    def layers(
        self, features: Array, tokens: Array, context: Context, step: L.PassInputs, cache: kv.KVCache
    ) -> tuple[Array, kv.Pending]:
        return run_blocks(list(self.stack), features, step, cache, self.config.layer)

    def at_root(self, outputs: Array, tokens: Array, context: Context) -> CloverPath:
        path = jnp.pad(tokens[:, :, None], ((0, 0), (0, 0), (0, self.config.num_heads - 1)))
        return CloverPath(self._attend(outputs, path, context, 0), path)

    def below(self, state: CloverPath, tokens: Array, depth: Array, context: Context) -> CloverPath:
        path = extend_path(state.tokens, tokens, depth)
        h = by_depth(len(self.heads), depth, lambda i: self._attend(state.h, path, context, i))
        return CloverPath(h, path)

    def _attend(self, h: Array, path: Array, context: Context, i: int) -> Array:
        embedded = embed(self.embed, path[:, :, : i + 1].reshape(len(path), -1), context).astype(h.dtype)
        return self.heads[i].attend(h, embedded.reshape(*path.shape[:2], i + 1, -1))

    def logits(self, outputs: Array, state: CloverPath, depth: Array | int, context: Context) -> Array:
        out = by_depth(len(self.heads), depth, lambda i: self.heads[i].norm(self.heads[i].block(state.h)))
        return unembed(out, context)


def clover(config: CloverConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """Build the module of a config."""
    return (Clover if config.version == 1 else Clover2)(config, rngs=rngs)


def clover_head(config: CloverConfig) -> Head:
    """Return the functions of Clover's heads. Their memory stores the layers' keys and values, and the last output."""
    limit = config.num_heads if config.version == 1 else None
    return recurrent("clover", clover, config, max_depth=limit, trained_depth=config.num_heads)


def of_target(target: LlamaConfig, **changes) -> CloverConfig:
    """Return the shapes of Clover-2 that the authors train for a target: two layers like the target's."""
    layer = target.draft_head_config(2)
    return dataclasses.replace(CloverConfig(layer, (target.num_layers,), vocab_size=target.vocab_size), **changes)


KIND = HeadKind(METHOD, clover, clover_head, of_target, ("num_heads",))
