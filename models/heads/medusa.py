"""Medusa: K heads on the target's last feature, each for a token further ahead.

Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (ICML 2024),
arXiv 2401.10774. z = f_t; z <- z + SiLU(W z + b) in each block; logits_k = W_k z says x_{t+1+k}.
The heads do not see what the others drafted: at one depth all nodes have the same distribution.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from specjax.arrays.indexing import take_along
from specjax.models import layers as L
from specjax.models.heads.blocks import DraftVocabulary, bind, newest, unembed
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class MedusaConfig:
    """Shapes of a set of Medusa heads."""

    width: int
    vocab_size: int
    num_heads: int
    num_blocks: int = 1
    bias: bool = True
    own_head: bool = True  # False: all share the target's
    draft_vocab_size: int = 0  # ids that they can draft; 0: all
    dtype: str = "float32"

    @property
    def is_trimmed(self) -> bool:
        return 0 < self.draft_vocab_size < self.vocab_size


class MedusaBranch(nnx.Module):
    """One head. New blocks add nothing, so that with the target's own head it starts as that."""

    def __init__(self, c: MedusaConfig, rngs: nnx.Rngs):
        blocks = [L.Linear(c.width, c.width, bias=c.bias, dtype=c.dtype, rngs=rngs) for _ in range(c.num_blocks)]
        for block in blocks:
            block.weight[...] = jnp.zeros_like(block.weight[...])
        size = c.draft_vocab_size or c.vocab_size
        self.blocks = nnx.List(blocks)
        self.head = L.Embedding(size, c.width, dtype=c.dtype, rngs=rngs) if c.own_head else None

    def __call__(self, z: Array) -> Array:
        for block in self.blocks:
            z = z + nnx.silu(block(z))
        return z


class Medusa(nnx.Module):
    """All heads."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.branches = nnx.List([MedusaBranch(config, rngs) for _ in range(config.num_heads)])
        self.vocabulary = DraftVocabulary(config.vocab_size, config.draft_vocab_size) if config.is_trimmed else None

    def __call__(self, feature: Array, context: Context) -> Array:
        """float32[B, K, V] of a feature [B, D]."""
        states = [branch(feature.astype(self.config.dtype)) for branch in self.branches]
        if not self.config.own_head:
            return unembed(jnp.stack(states, 1), context)
        heads = [branch.head for branch in self.branches]
        logits = jnp.stack([head.logits(z) for head, z in zip(heads, states, strict=True) if head is not None], 1)
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)


class Scratch(NamedTuple):
    logits: Array  # float32[B, K, V], by depth


@functools.cache
def medusa_head(config: MedusaConfig) -> Head:
    """The functions of Medusa's heads. Memory: the last feature [B, D]."""
    module_of = bind(Medusa, config)

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, config.width), config.dtype)

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return newest(pairs.features, pairs.count, last)

    def start(params, last: Array, context: Context, places: int) -> tuple[Scratch, Array]:
        logits = module_of(params)(last, context)
        return Scratch(logits), logits[:, 0]

    def follow(params, scratch: Scratch, drafted: DraftedNodes, context: Context) -> tuple[Scratch, Array]:
        return scratch, take_along(scratch.logits, drafted.depth[:, :, None], 1)

    return Head(init_memory, read, start, follow, "medusa", config, max_depth=config.num_heads, is_single_pass=True)


def of_target(target: LlamaConfig, *, num_heads: int = 4, **changes) -> MedusaConfig:
    """The shapes that the authors train for a target: heads of its whole vocabulary, one block each."""
    return MedusaConfig(target.width, target.vocab_size, num_heads, dtype=target.dtype, **changes)
