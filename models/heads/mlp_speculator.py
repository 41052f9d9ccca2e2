"""The MLP speculator: a state that takes in one drafted token after another, through an MLP per depth.

Wertheimer et al.: Accelerating Production LLMs with Combined Token/Embedding Speculators (2024), arXiv 2404.19124.
s = f, or rms(f) / sqrt 2; then for each token x, the root first, s <- GELU(norm_i(P_i s + (a / b) E_i x)), with
b = 0.5^(0.5 / K) and a = sqrt((1 - b^2) d / 2), and logits_i = W_i s. That of vllm speculators differs in its norms,
which take the mean off first, and by default reads the target's last stream before its final norm.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.heads.blocks import by_depth
from specjax.models.heads.contract import Head
from specjax.models.heads.recurrent import recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class MlpSpeculatorConfig:
    """Shapes of an MLP speculator. Published: width `emb_dim`, inner_width `inner_dim` (0: width), num_heads
    `n_predict`, tied `tie_weights`, scaled `scale_input`.

    Parameters are published under `speculator.`: embeddings[i] `emb.i`, projections[i] `proj.i`, norms[i] `ln.i`,
    heads[i] `head.i`. Where they are tied there are one of each and two projections; files repeat the last.
    """

    width: int
    inner_width: int
    vocab_size: int
    num_heads: int
    tied: bool = False
    scaled: bool = False
    centred: bool = False  # its norms take the mean off first
    norm_eps: float = 1e-6
    dtype: str = "float32"
    layer: None = None
    taps: tuple[int, ...] = ()  # the last stream, or none: the feature

    @property
    def said(self) -> int:
        return self.width

    @property
    def token_weight(self) -> float:
        """Of a token's embedding beside the state, so that both stay of one size."""
        state = 0.5 ** (0.5 / self.num_heads)
        return ((1 - state**2) * self.inner_width / 2) ** 0.5 / state


class ShiftedNorm(L.RMSNorm):
    """RMSNorm with a bias; centred: of what is left without the mean, which is a layer norm."""

    def __init__(self, width: int, eps: float, *, centred: bool, dtype):
        super().__init__(width, eps, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.centred = centred

    def __call__(self, x: Array) -> Array:
        if self.centred:
            x = x - jnp.mean(x, -1, keepdims=True)
        return super().__call__(x) + self.bias[...]


class MlpSpeculator(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule` without layers; its state is s, [B, F, inner]."""

    def __init__(self, config: MlpSpeculatorConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config
        own = range(1 if c.tied else c.num_heads)
        inputs = [c.width, *[c.inner_width] * ((min(2, c.num_heads) if c.tied else c.num_heads) - 1)]
        table = lambda: L.Embedding(c.vocab_size, c.inner_width, dtype=c.dtype, rngs=rngs)
        norm = lambda: ShiftedNorm(c.inner_width, c.norm_eps, centred=c.centred, dtype=c.dtype)
        self.embeddings = nnx.List([table() for _ in own])
        self.projections = nnx.List([L.Linear(n, c.inner_width, dtype=c.dtype, rngs=rngs) for n in inputs])
        self.norms = nnx.List([norm() for _ in own])
        self.heads = nnx.List([table() for _ in own])

    def at_root(self, said: Array, tokens: Array, context: Context) -> Array:
        if self.config.scaled:
            x = said.astype(jnp.float32)
            x = x / jnp.sqrt(2 * (jnp.mean(x * x, -1, keepdims=True) + self.config.norm_eps))
            said = x.astype(said.dtype)
        return self._take_in(said, tokens, 0)

    def below(self, state: Array, tokens: Array, depth: Array, context: Context) -> Array:
        # Not `by_depth` of one: a chain of one token is never below the root, but its program is traced.
        count = max(2, len(self.projections))
        return by_depth(count, depth, functools.partial(self._take_in, state, tokens))

    def _take_in(self, state: Array, tokens: Array, i: int) -> Array:
        of = lambda parts: parts[min(i, len(parts) - 1)]
        x = of(self.projections)(state) + self.config.token_weight * of(self.embeddings)(tokens)
        return nnx.gelu(of(self.norms)(x), approximate=False)

    def logits(self, said: Array, state: Array, depth: Array | int, context: Context) -> Array:
        return by_depth(len(self.heads), depth, lambda i: self.heads[i].logits(state))


def mlp_speculator_head(config: MlpSpeculatorConfig) -> Head:
    """The functions of an MLP speculator."""
    return recurrent("mlp_speculator", MlpSpeculator, config, max_depth=config.num_heads)


def of_target(target: LlamaConfig, *, num_heads: int = 3, **changes) -> MlpSpeculatorConfig:
    """The shapes of the published ones for a target: as wide as it, three tokens."""
    config = MlpSpeculatorConfig(target.width, target.width, target.vocab_size, num_heads, dtype=target.dtype)
    return dataclasses.replace(config, **changes)
