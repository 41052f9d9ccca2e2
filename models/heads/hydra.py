"""Hydra and Hydra++: Medusa's heads that also read the tokens drafted so far.

Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (2024), arXiv 2402.05109.
c = [g; E root; E draft 1; ..; E draft i]; z = R_i c + SiLU(A_i c), then z <- z + SiLU(W z + b) in further blocks;
logits_i = O_i z says draft i + 1. g is the target's last feature, or in Hydra++ what a decoder layer over the features,
the prefix layer, says of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import Residual, by_depth, embed, run_blocks
from specjax.models.heads.contract import Head
from specjax.models.heads.eagle import Layer
from specjax.models.heads.recurrent import longer, recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class HydraConfig:
    """Shapes of a set of Hydra heads. Published: num_heads `hydra_num_heads`, num_blocks `hydra_num_layers`, a `layer`
    where `hydra_head_arch` is "prefix-mlp".

    Parameters, published without or with the prefix layer (a dropout counts there): branches[i].first.residual and
    .linear `hydra_mlp.i.0.` or `.1.` `res_connection`, `linear`; branches[i].blocks[j] `hydra_mlp.i.{j + 1}.linear` or
    `.{2 j + 3}.`; branches[i].head and .head_bias `hydra_lm_head.i` or `.i.1`; prefix and norm
    `prefix_embeding_layer.layers.0`, `.norm`.
    """

    width: int
    vocab_size: int
    num_heads: int
    num_blocks: int = 1  # the first, which reads all, included
    layer: LlamaConfig | None = None  # the prefix layer of Hydra++, one layer; None: Hydra
    dtype: str = "float32"
    taps: tuple[int, ...] = ()

    @property
    def said(self) -> int:
        return self.width


class HydraInput(nnx.Module):
    """R c + SiLU(A c). New ones say the feature, whatever was drafted."""

    def __init__(self, c: HydraConfig, inputs: int, rngs: nnx.Rngs):
        linear = lambda: L.Linear(inputs * c.width, c.width, bias=True, dtype=c.dtype, rngs=rngs)
        self.residual, self.linear = linear(), linear()
        self.residual.weight[...] = jnp.eye(c.width, inputs * c.width, dtype=c.dtype)
        self.linear.weight[...] = jnp.zeros_like(self.linear.weight[...])

    def __call__(self, x: Array) -> Array:
        return self.residual(x) + nnx.silu(self.linear(x))


class HydraBranch(nnx.Module):
    """One head, which reads the feature and `inputs` - 1 tokens."""

    def __init__(self, c: HydraConfig, inputs: int, rngs: nnx.Rngs):
        self.first = HydraInput(c, inputs, rngs)
        self.blocks = nnx.List([Residual(c.width, dtype=c.dtype, rngs=rngs) for _ in range(c.num_blocks - 1)])
        self.head = L.Embedding(c.vocab_size, c.width, dtype=c.dtype, rngs=rngs)
        self.head_bias = nnx.Param(jnp.zeros((c.vocab_size,), c.dtype))

    def __call__(self, x: Array) -> Array:
        z = self.first(x)
        for block in self.blocks:
            z = block(z)
        return self.head.logits(z) + self.head_bias[...].astype(jnp.float32)


class Hydra(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule`; its state are the tokens from the root on, int32[B, F, heads]."""

    def __init__(self, config: HydraConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.prefix = None if c is None else Layer(c, has_norm=True, rngs=rngs)
        self.norm = None if c is None else L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.branches = nnx.List([HydraBranch(config, i + 2, rngs) for i in range(config.num_heads)])

    def layers(
        self, features: Array, tokens: Array, context: Context, step: L.PassInputs, cache: kv.KVCache
    ) -> tuple[Array, kv.Pending]:
        assert self.config.layer is not None and self.prefix is not None and self.norm is not None
        x, pending = run_blocks([self.prefix], features, step, cache, self.config.layer)
        return self.norm(x), pending

    def at_root(self, said: Array, tokens: Array, context: Context) -> Array:
        return jnp.pad(tokens[:, :, None], ((0, 0), (0, 0), (0, self.config.num_heads - 1)))

    def below(self, state: Array, tokens: Array, depth: Array, context: Context) -> Array:
        return longer(state, tokens, depth)

    def logits(self, said: Array, state: Array, depth: Array | int, context: Context) -> Array:
        batch, nodes, most = state.shape
        said = jnp.broadcast_to(said, (batch, nodes, self.config.width))

        def run(i: int) -> Array:
            embedded = embed(None, state[:, :, : i + 1].reshape(batch, -1), context).astype(said.dtype)
            return self.branches[i](jnp.concatenate([said, embedded.reshape(batch, nodes, -1)], -1))

        return by_depth(most, depth, run)


def hydra_head(config: HydraConfig) -> Head:
    """The functions of Hydra's heads."""
    return recurrent("hydra", Hydra, config, max_depth=config.num_heads)


def of_target(target: LlamaConfig, *, num_heads: int = 4, **changes) -> HydraConfig:
    """Hydra++ as the authors train it for a target: four layers a head, and a prefix layer like its own."""
    layer = target.draft_head_config()
    config = HydraConfig(target.width, target.vocab_size, num_heads, 4, layer, target.dtype)
    return dataclasses.replace(config, **changes)
