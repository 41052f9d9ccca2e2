"""The MLP speculator: a state that is updated with each drafted token, by one MLP per depth.

Wertheimer et al.: Accelerating Production LLMs with Combined Token/Embedding Speculators (2024), arXiv 2404.19124.

Rule: s = f, or rms(f) / sqrt 2. For each token x, beginning with the root, s <- GELU(norm_i(P_i s + (a / b) E_i x)).
b is 0.5^(0.5 / K), a is sqrt((1 - b^2) d / 2), and logits_i = W_i s. In vllm speculators the norms subtract the
mean first, and the head reads the target's last stream before its final norm by default.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the authors draft several chains that share no node. Here any tree can be drafted, such as `trees.beam`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import layers as L
from specjax.models.heads.blocks import by_depth
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.recurrent import recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="mlp_speculator",
    summary="drafts with one MLP per depth that updates the target's last hidden state with each drafted token",
    paper="Wertheimer et al. 2024, arXiv 2404.19124",
    options=shared.head_options(),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class MlpSpeculatorConfig:
    """Shapes of an MLP speculator.

    tied: all depths share one embedding, norm and output layer, and there are two projections.
    """

    width: int
    inner_width: int
    vocab_size: int
    num_heads: int
    tied: bool = False
    scaled: bool = False
    centred: bool = False  # the norms subtract the mean first
    norm_eps: float = 1e-6
    dtype: str = "float32"
    layer: None = None
    taps: tuple[int, ...] = ()  # the last stream; (): the feature

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def token_weight(self) -> float:
        """Return the weight of a token's embedding, which keeps the scales of embedding and state equal."""
        state_weight = 0.5 ** (0.5 / self.num_heads)
        return ((1 - state_weight**2) * self.inner_width / 2) ** 0.5 / state_weight


class ShiftedNorm(L.RMSNorm):
    """RMSNorm with a bias. centred: subtract the mean first, which makes it a layer norm."""

    def __init__(self, width: int, eps: float, *, centred: bool, dtype):
        super().__init__(width, eps, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.centred = centred

    def __call__(self, x: Array) -> Array:
        if self.centred:
            x = x - jnp.mean(x, -1, keepdims=True)
        return super().__call__(x) + self.bias[...]


class MlpSpeculator(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule` without layers. Its state is s [B, F, inner]."""

    def __init__(self, config: MlpSpeculatorConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config
        count = 1 if c.tied else c.num_heads
        inputs = [c.width, *[c.inner_width] * ((min(2, c.num_heads) if c.tied else c.num_heads) - 1)]
        table = lambda: L.Embedding(c.vocab_size, c.inner_width, dtype=c.dtype, rngs=rngs)
        norm = lambda: ShiftedNorm(c.inner_width, c.norm_eps, centred=c.centred, dtype=c.dtype)
        self.embeddings = nnx.List([table() for _ in range(count)])
        self.projections = nnx.List([L.Linear(n, c.inner_width, dtype=c.dtype, rngs=rngs) for n in inputs])
        self.norms = nnx.List([norm() for _ in range(count)])
        self.heads = nnx.List([table() for _ in range(count)])

    def at_root(self, outputs: Array, tokens: Array, context: Context) -> Array:
        state = outputs
        if self.config.scaled:
            x = outputs.astype(jnp.float32)
            x = x / jnp.sqrt(2 * (jnp.mean(x * x, -1, keepdims=True) + self.config.norm_eps))
            state = x.astype(outputs.dtype)
        return self._update(state, tokens, 0)

    def below(self, state: Array, tokens: Array, depth: Array, context: Context) -> Array:
        # At least 2: a chain of one token never gets below the root, but this function is traced for it.
        count = max(2, len(self.projections))
        return by_depth(count, depth, functools.partial(self._update, state, tokens))

    def _update(self, state: Array, tokens: Array, i: int) -> Array:
        select = lambda parts: parts[min(i, len(parts) - 1)]
        x = select(self.projections)(state) + self.config.token_weight * select(self.embeddings)(tokens)
        return nnx.gelu(select(self.norms)(x), approximate=False)

    def logits(self, outputs: Array, state: Array, depth: Array | int, context: Context) -> Array:
        return by_depth(len(self.heads), depth, lambda i: self.heads[i].logits(state))


def mlp_speculator_head(config: MlpSpeculatorConfig) -> Head:
    """Return the functions of an MLP speculator. Its memory stores the last feature."""
    return recurrent("mlp_speculator", MlpSpeculator, config, max_depth=config.num_heads)


def of_target(target: LlamaConfig, *, num_heads: int = 3, **changes) -> MlpSpeculatorConfig:
    """Return the shapes of the published speculators for a target: the target's width, and three drafted tokens."""
    config = MlpSpeculatorConfig(target.width, target.width, target.vocab_size, num_heads, dtype=target.dtype)
    return dataclasses.replace(config, **changes)


KIND = HeadKind(METHOD, MlpSpeculator, mlp_speculator_head, of_target, ("num_heads",))
