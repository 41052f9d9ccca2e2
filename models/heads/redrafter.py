"""ReDrafter: a small recurrent network over the drafted tokens, next to the target's last feature.

Cheng et al.: Recurrent Drafter for Fast Speculative Decoding in Large Language Models (2024), arXiv 2403.09919.

Rule: s = 0; for each token x, beginning with the root, s <- SiLU(W E x + U s + b), or E x + s. z = [f; s], where f is
the same feature in the whole step; z <- z + SiLU(R z + c) in each block; logits = O z. The authors draft by beam
search, `trees.beam(10, 4)`. Beams with a common prefix share its nodes there, which is their dynamic tree attention.
Guarantee: distribution (greedy beams are a point mass; sampled ones are verified with their q).
Deviations: the tree keeps all nodes of the beam search, 1 + M D of them; the authors keep the prefixes of the last M
beams. q is the head's full distribution, not its 50 most likely tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import layers as L
from specjax.models.heads.blocks import Residual, embed
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.recurrent import recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="redrafter",
    summary="drafts with a recurrent network over the drafted tokens that also reads the target's last hidden state",
    paper="Cheng et al. 2024, arXiv 2403.09919",
    options=shared.head_options(length=5),
    cpu_options={"num_tokens": 7},
    **shared.HEAD,
)


@dataclass(frozen=True)
class ReDrafterConfig:
    """Shapes of a ReDrafter."""

    width: int
    exit_width: int  # width of z; a projection is added if it is not twice the width
    vocab_size: int
    num_blocks: int = 2
    has_weights: bool = True  # False: s is a sum of embeddings
    dtype: str = "float32"
    layer: None = None
    taps: tuple[int, ...] = ()

    @property
    def output_width(self) -> int:
        return self.width


class ReDrafter(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule` without layers. Its state is s [B, F, D]."""

    def __init__(self, config: ReDrafterConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config
        square = lambda bias: L.Linear(c.width, c.width, bias=bias, dtype=c.dtype, rngs=rngs)
        self.rnn_w = square(False) if c.has_weights else None
        self.rnn_u = square(True) if c.has_weights else None
        fits = c.exit_width == 2 * c.width
        self.input_proj = None if fits else L.Linear(2 * c.width, c.exit_width, bias=True, dtype=c.dtype, rngs=rngs)
        self.blocks = nnx.List([Residual(c.exit_width, dtype=c.dtype, rngs=rngs) for _ in range(c.num_blocks)])
        self.head = L.Embedding(c.vocab_size, c.exit_width, dtype=c.dtype, rngs=rngs)

    def at_root(self, outputs: Array, tokens: Array, context: Context) -> Array:
        return self._update(jnp.zeros_like(outputs), tokens, context)

    def below(self, state: Array, tokens: Array, depth: Array, context: Context) -> Array:
        return self._update(state, tokens, context)

    def _update(self, state: Array, tokens: Array, context: Context) -> Array:
        embedded = embed(None, tokens, context).astype(state.dtype)
        if self.rnn_w is None or self.rnn_u is None:
            return embedded + state
        return nnx.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def logits(self, outputs: Array, state: Array, depth: Array | int, context: Context) -> Array:
        z = jnp.concatenate([jnp.broadcast_to(outputs, state.shape), state], -1)
        z = z if self.input_proj is None else self.input_proj(z)
        for block in self.blocks:
            z = block(z)
        return self.head.logits(z)


def redrafter_head(config: ReDrafterConfig) -> Head:
    """Return the functions of a ReDrafter. Its memory stores the last feature."""
    return recurrent("redrafter", ReDrafter, config)


def of_target(target: LlamaConfig, **changes) -> ReDrafterConfig:
    """Return the shapes that the authors train for a target."""
    config = ReDrafterConfig(target.width, 2 * target.width, target.vocab_size, dtype=target.dtype)
    return dataclasses.replace(config, **changes)


KIND = HeadKind(METHOD, ReDrafter, redrafter_head, of_target)
