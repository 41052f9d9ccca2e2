"""EAGLE-3 and 3.1: a decoder layer that reads several of the target's streams, with a head and a vocabulary of its own.

Li, Wei, Zhang, Zhang: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test
(2025), arXiv 2503.01840. s = fc[h^a; h^b; h^c] of a committed pair, its own output of a drafted one;
y = [norm_e(E x_{t+1}); norm_h(s)]; s' = s + attention(y); s'' = s' + MLP(norm(s')); logits = W_d norm_out(s'').
Eagle 3.1 (speculators) adds a norm for each tap, and feeds norm_out(s'') back.

The flags are those that published heads differ in; each defaults to what the authors' own do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.heads.autoregressive import autoregressive
from specjax.models.heads.blocks import DraftVocabulary, embed, run_blocks, taps_of, unembed
from specjax.models.heads.contract import Head
from specjax.models.heads.eagle import Layer
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class Eagle3Config:
    """Shapes and flags of an EAGLE-3 head."""

    layer: LlamaConfig  # of its layers; vocab_size: of its own head
    taps: tuple[int, ...]  # streams of the target, 0 the embedding
    target_width: int
    vocab_size: int  # of the target
    norm_taps: Literal["no", "each", "joined"] = "no"  # before fc: every tap (3.1), or all of them joined
    norm_before_residual: bool = False  # the residual is the normed state
    norm_output: bool = False  # what is fed back is behind the last norm (3.1)
    embeds: bool = False  # has an embedding of its own, in place of the target's
    own_head: bool = True  # False: the target's
    head_rank: int = 0  # of its own head, a product of two matrices; 0: one of full rank

    @property
    def said(self) -> int:
        return self.layer.width

    @property
    def is_trimmed(self) -> bool:
        """Whether it can draft only some of the target's ids."""
        return self.own_head and self.layer.vocab_size < self.vocab_size


class Eagle3FirstLayer(nnx.Module):
    """The layer that reads embeddings and states side by side."""

    def __init__(self, config: Eagle3Config, rngs: nnx.Rngs):
        c, self.norm_before_residual = config.layer, config.norm_before_residual
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.embedding_norm, self.state_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = make_attention(c, fan_in=2 * c.width, rngs=rngs)
        self.mlp = L.GatedMLP(c.width, c.mlp_width, nnx.silu, dtype=c.dtype, rngs=rngs)

    def __call__(self, embedded: Array, state: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        normed = self.state_norm(state)
        attended, new = self.attention(jnp.concatenate([self.embedding_norm(embedded), normed], -1), inputs)
        x = (normed if self.norm_before_residual else state) + attended
        return x + inputs.shared.sum(self.mlp(self.mlp_norm(x)), "mlp"), new


class Eagle3(nnx.Module):
    """A `specjax.models.heads.autoregressive.AutoregressiveModule`."""

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs):
        self.config, c, taps = config, config.layer, len(config.taps)
        norm = lambda width: L.RMSNorm(width, c.norm_eps, dtype=c.dtype)
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        each = [norm(config.target_width) for _ in config.taps] if config.norm_taps == "each" else []
        self.tap_norms = nnx.List(each)
        self.joined_norm = norm(taps * config.target_width) if config.norm_taps == "joined" else None
        self.fc = L.Linear(taps * config.target_width, c.width, dtype=c.dtype, rngs=rngs)
        self.first = Eagle3FirstLayer(config, rngs)
        self.others = nnx.List([Layer(c, has_norm=True, rngs=rngs) for _ in range(c.num_layers - 1)])
        self.norm = norm(c.width)
        rank = config.head_rank
        self.head_down = L.Linear(c.width, rank, dtype=c.dtype, rngs=rngs) if rank else None
        self.head = L.Embedding(c.vocab_size, rank or c.width, dtype=c.dtype, rngs=rngs) if config.own_head else None
        self.vocabulary = DraftVocabulary(config.vocab_size, c.vocab_size) if config.is_trimmed else None

    def embedded(self, tokens: Array, context: Context) -> Array:
        return embed(self.embed, tokens, context).astype(self.config.layer.dtype)

    def fused(self, features: Array) -> Array:
        if self.joined_norm is not None:
            features = self.joined_norm(features)
        if self.tap_norms:
            taps = jnp.split(features, len(self.tap_norms), -1)
            features = jnp.concatenate([norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)], -1)
        return self.fc(features)

    def layers(self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        first = lambda x, inputs: self.first(embedded, x, inputs)
        return run_blocks([first, *self.others], state, step, cache, self.config.layer)

    def fed_back(self, said: Array) -> Array:
        return self.norm(said) if self.config.norm_output else said

    def logits(self, said: Array, context: Context) -> Array:
        normed = self.norm(said)
        if self.head is None:
            return unembed(normed, context)
        logits = self.head.logits(normed if self.head_down is None else self.head_down(normed))
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)


def eagle3_head(config: Eagle3Config) -> Head:
    """The functions of an EAGLE-3 head."""
    return autoregressive("eagle3", Eagle3, config)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The authors': the inputs of layers 2, L / 2 and L - 3 of a target of L layers; of a very shallow one, those that
    there are."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


def of_target(
    target: LlamaConfig, *, draft_vocab_size: int = 32000, taps: tuple[int, ...] | None = None, head_rank: int = 0,
    **changes,
) -> Eagle3Config:  # fmt: skip
    """The shapes that the authors train for a target: a layer like its own, and a head of 32,000 ids.

    Raises: UsageError for a head_rank that is not below the width.
    """
    size = min(draft_vocab_size, target.vocab_size)
    layer = target.draft_head_config(vocab_size=size, **changes)
    if not 0 <= head_rank < target.width:
        raise UsageError(f"head_rank must be below the width of the target, {target.width}, not {head_rank}")
    taps = taps_of(target, taps, default_taps(target.num_layers))
    return Eagle3Config(layer, taps, target.width, target.vocab_size, head_rank=head_rank)
