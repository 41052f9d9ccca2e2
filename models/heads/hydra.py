"""Hydra and Hydra++: Medusa's heads that also read the tokens drafted so far.

Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (2024), arXiv 2402.05109.

Rule: head i reads c = [g; E root; E draft 1; ..; E draft i] and computes z = R_i c + SiLU(A_i c), then
z <- z + SiLU(W z + b) in further blocks. logits_i = O_i z predict draft i + 1. g is the target's last feature. In
Hydra++ it is the output of a decoder layer over the features, the prefix layer. The authors draft `trees.medusa()`.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q, the head's
distribution after the drafted tokens). The paper's typical acceptance is `verifiers.typical`, lossy.
Deviations: the prefix layer reads the accepted tokens at the start of the next draft, in one pass.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import Residual, by_depth, embed, run_blocks
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.eagle import Layer
from specjax.models.heads.recurrent import extend_path, recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="hydra",
    summary="drafts with one head per depth that reads the target's last hidden state and the tokens drafted so far",
    paper="Ankner et al. 2024, arXiv 2402.05109",
    options=shared.head_options(),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class HydraConfig:
    """Shapes of a set of Hydra heads. The published config has `hydra_num_heads` and `hydra_num_layers` (blocks)."""

    width: int
    vocab_size: int
    num_heads: int
    num_blocks: int = 1  # including the first, which reads the concatenation
    layer: LlamaConfig | None = None  # shape of the prefix layer of Hydra++; None: Hydra
    dtype: str = "float32"
    taps: tuple[int, ...] = ()

    @property
    def output_width(self) -> int:
        return self.width


class HydraInput(nnx.Module):
    """R c + SiLU(A c). A new module returns the feature and ignores the drafted tokens."""

    def __init__(self, c: HydraConfig, inputs: int, rngs: nnx.Rngs):
        linear = lambda: L.Linear(inputs * c.width, c.width, bias=True, dtype=c.dtype, rngs=rngs)
        self.residual, self.linear = linear(), linear()
        self.residual.weight[...] = jnp.eye(c.width, inputs * c.width, dtype=c.dtype)
        self.linear.weight[...] = jnp.zeros_like(self.linear.weight[...])

    def __call__(self, x: Array) -> Array:
        return self.residual(x) + nnx.silu(self.linear(x))


class HydraBranch(nnx.Module):
    """A head that reads the feature and `inputs - 1` tokens."""

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
    """A `specjax.models.heads.recurrent.RecurrentModule`. Its state is tokens int32[B, F, heads] from the root."""

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

    def at_root(self, outputs: Array, tokens: Array, context: Context) -> Array:
        return jnp.pad(tokens[:, :, None], ((0, 0), (0, 0), (0, self.config.num_heads - 1)))

    def below(self, state: Array, tokens: Array, depth: Array, context: Context) -> Array:
        return extend_path(state, tokens, depth)

    def logits(self, outputs: Array, state: Array, depth: Array | int, context: Context) -> Array:
        batch, nodes, num_heads = state.shape
        features = jnp.broadcast_to(outputs, (batch, nodes, self.config.width))

        def run(i: int) -> Array:
            embedded = embed(None, state[:, :, : i + 1].reshape(batch, -1), context).astype(features.dtype)
            return self.branches[i](jnp.concatenate([features, embedded.reshape(batch, nodes, -1)], -1))

        return by_depth(num_heads, depth, run)


def hydra_head(config: HydraConfig) -> Head:
    """Return the functions of Hydra's heads. Their memory stores the last feature, or that of the prefix layer."""
    return recurrent("hydra", Hydra, config, max_depth=config.num_heads)


def of_target(target: LlamaConfig, *, num_heads: int = 4, **changes) -> HydraConfig:
    """Return the shapes of Hydra++ for a target: four blocks per head, and a prefix layer like the target's layers."""
    layer = target.draft_head_config()
    config = HydraConfig(target.width, target.vocab_size, num_heads, 4, layer, target.dtype)
    return dataclasses.replace(config, **changes)


KIND = HeadKind(METHOD, Hydra, hydra_head, of_target, ("num_heads",))
