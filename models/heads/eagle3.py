"""EAGLE-3 and 3.1: a decoder layer over several of the target's streams, with its own output layer and vocabulary.

Li, Wei, Zhang, Zhang: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test
(2025), arXiv 2503.01840.

Rule: the state s of a committed pair is fc[h^a; h^b; h^c], that of a drafted pair is the previous output.
  y = [norm_e(E x_{t+1}); norm_h(s)]; s' = s + attention(y); s'' = s' + MLP(norm(s')); logits = W_d norm_out(s'').
EAGLE 3.1 (speculators) adds a norm for each tap, and feeds norm_out(s'') back. The authors draft `trees.eagle2()`.
Published heads differ in the flags of the config; the defaults are those of the authors' own heads.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q). Tokens
outside of the head's vocabulary are never drafted.
Deviations: as in `eagle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, TypicalAcceptance, shared
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.heads.autoregressive import autoregressive
from specjax.models.heads.blocks import DraftVocabulary, check_taps, embed, run_blocks, unembed
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.eagle import Layer
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="eagle3",
    summary="drafts with a decoder layer over hidden states of several target layers, and its own output layer",
    paper="Li et al. 2025, arXiv 2503.01840",
    acceptance=TypicalAcceptance(
        (0.774,), "Llama 3.1 8B on MT-Bench, published: 3.86 tokens per pass of chains of 7 (docs/spec_bench.md)"
    ),
    options=shared.head_options(length=5),
    cpu_options={"num_tokens": 3},
    wide_tree="eagle2:8x6x60",
    **shared.HEAD,
)


@dataclass(frozen=True)
class Eagle3Config:
    """Shapes and flags of an EAGLE-3 head."""

    layer: LlamaConfig  # shape of its layers; vocab_size: of its own output layer
    taps: tuple[int, ...]  # streams of the target; 0: the embedding
    target_width: int
    vocab_size: int  # of the target
    norm_taps: Literal["no", "each", "joined"] = "no"  # norms before fc: of each tap (3.1), or of their concatenation
    norm_before_residual: bool = False  # the residual is the normalised state
    norm_output: bool = False  # feeds the output of the last norm back (3.1)
    embeds: bool = False  # has its own embedding; False: the target's
    own_head: bool = True  # has its own output layer; False: the target's
    head_rank: int = 0  # rank of its own output layer, a product of two matrices; 0: full rank

    @property
    def output_width(self) -> int:
        return self.layer.width

    @property
    def is_trimmed(self) -> bool:
        """Return True if it can draft only a subset of the target's ids."""
        return self.own_head and self.layer.vocab_size < self.vocab_size


class Eagle3FirstLayer(nnx.Module):
    """The first layer, which reads the concatenation of embeddings and states."""

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
    """The module of EAGLE-3, a `specjax.models.heads.autoregressive.AutoregressiveModule`."""

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs):
        self.config, c, taps = config, config.layer, len(config.taps)
        norm = lambda width: L.RMSNorm(width, c.norm_eps, dtype=c.dtype)
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        tap_norms = [norm(config.target_width) for _ in config.taps] if config.norm_taps == "each" else []
        self.tap_norms = nnx.List(tap_norms)
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

    def fed_back(self, outputs: Array) -> Array:
        return self.norm(outputs) if self.config.norm_output else outputs

    def logits(self, outputs: Array, context: Context) -> Array:
        normed = self.norm(outputs)
        if self.head is None:
            return unembed(normed, context)
        logits = self.head.logits(normed if self.head_down is None else self.head_down(normed))
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)


def eagle3_head(config: Eagle3Config) -> Head:
    """Return the functions of an EAGLE-3 head."""
    return autoregressive("eagle3", Eagle3, config)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the authors' streams: the inputs of layers 2, L / 2 and L - 3 of L, limited to existing layers.

    Files of shallow targets that list no streams mean these, even where they coincide or do not rise.
    """
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


def of_target(
    target: LlamaConfig, *, draft_vocab_size: int | None = None, taps: tuple[int, ...] | None = None,
    head_rank: int = 0, num_layers: int = 1, mlp_width: int | None = None, own_head: bool = True, **changes,
) -> Eagle3Config:  # fmt: skip
    """Return the shapes that the authors train for a target: a layer like the target's, and 32,000 drafted ids.

    EAGLE-3.1 has `norm_taps="each"` and `norm_output=True`. changes: flags of `Eagle3Config`.

    Raises: UsageError for a head_rank that is not below the width, or for a draft vocabulary or a rank without an
      output layer.
    """
    if not own_head and (draft_vocab_size or head_rank):
        raise UsageError("draft_vocab_size and head_rank are of the head's own output layer; leave own_head=False out")
    size = min(draft_vocab_size or 32000, target.vocab_size) if own_head else target.vocab_size
    layer = target.draft_head_config(num_layers, vocab_size=size, mlp_width=mlp_width or target.mlp_width)
    if not 0 <= head_rank < target.width:
        raise UsageError(f"head_rank must be below the width of the target, {target.width}, not {head_rank}")
    taps = check_taps(target, taps, default_taps(target.num_layers))
    return Eagle3Config(layer, taps, target.width, target.vocab_size, head_rank=head_rank, own_head=own_head, **changes)


FLAGS = ("embeds", "own_head", "norm_before_residual", "norm_output")
CHOICES = (("norm_taps", ("no", "each", "joined")),)

KIND = HeadKind(
    METHOD, Eagle3, eagle3_head, of_target, ("num_layers", "draft_vocab_size", "mlp_width", "head_rank"), taps=True,
    flags=FLAGS, choices=CHOICES,
)  # fmt: skip
