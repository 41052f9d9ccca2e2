"""ReDrafter: a small recurrent network over the drafted tokens beside the target's last feature.

Cheng et al.: Recurrent Drafter for Fast Speculative Decoding in Large Language Models (2024), arXiv 2403.09919.
s = 0; for each token x, the root first, s <- SiLU(W E x + U s + b), or E x + s; z = [f; s], with f the same in the
whole round; z <- z + SiLU(R z + c) in each block; logits = O z.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.heads.blocks import Residual, embed
from specjax.models.heads.contract import Head
from specjax.models.heads.recurrent import recurrent
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class ReDrafterConfig:
    """Shapes of a ReDrafter. Published: width `hidden_size`, exit_width `exit_dim`, num_blocks `num_draft_layers`,
    has_weights `rnn`.

    Parameters: rnn_w, rnn_u and input_proj as published, blocks[j].linear `lm_head.j.linear`, head `lm_head.{last}`.
    """

    width: int
    exit_width: int  # of what the head reads; there is a projection where that is not twice the width
    vocab_size: int
    num_blocks: int = 2
    has_weights: bool = True  # False: the state is a sum of embeddings
    dtype: str = "float32"
    layer: None = None
    taps: tuple[int, ...] = ()

    @property
    def said(self) -> int:
        return self.width


class ReDrafter(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule` without layers; its state is s, [B, F, D]."""

    def __init__(self, config: ReDrafterConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config
        square = lambda bias: L.Linear(c.width, c.width, bias=bias, dtype=c.dtype, rngs=rngs)
        self.rnn_w = square(False) if c.has_weights else None
        self.rnn_u = square(True) if c.has_weights else None
        fits = c.exit_width == 2 * c.width
        self.input_proj = None if fits else L.Linear(2 * c.width, c.exit_width, bias=True, dtype=c.dtype, rngs=rngs)
        self.blocks = nnx.List([Residual(c.exit_width, dtype=c.dtype, rngs=rngs) for _ in range(c.num_blocks)])
        self.head = L.Embedding(c.vocab_size, c.exit_width, dtype=c.dtype, rngs=rngs)

    def at_root(self, said: Array, tokens: Array, context: Context) -> Array:
        return self._take_in(jnp.zeros_like(said), tokens, context)

    def below(self, state: Array, tokens: Array, depth: Array, context: Context) -> Array:
        return self._take_in(state, tokens, context)

    def _take_in(self, state: Array, tokens: Array, context: Context) -> Array:
        embedded = embed(None, tokens, context).astype(state.dtype)
        if self.rnn_w is None or self.rnn_u is None:
            return embedded + state
        return nnx.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def logits(self, said: Array, state: Array, depth: Array | int, context: Context) -> Array:
        z = jnp.concatenate([jnp.broadcast_to(said, state.shape), state], -1)
        z = z if self.input_proj is None else self.input_proj(z)
        for block in self.blocks:
            z = block(z)
        return self.head.logits(z)


def redrafter_head(config: ReDrafterConfig) -> Head:
    """The functions of a ReDrafter."""
    return recurrent("redrafter", ReDrafter, config)


def of_target(target: LlamaConfig, **changes) -> ReDrafterConfig:
    """The shapes that the authors train for a target."""
    config = ReDrafterConfig(target.width, 2 * target.width, target.vocab_size, dtype=target.dtype)
    return dataclasses.replace(config, **changes)
