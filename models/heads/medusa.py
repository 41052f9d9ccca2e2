"""Medusa: K output layers on the target's last feature, each for one token further ahead.

Cai, Li, Geng, Peng, Lee, Chen, Dao: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads
(ICML 2024), arXiv 2401.10774.

Rule: z = f_t; z <- z + SiLU(W z + b) in each block; logits_k = W_k z predict x_{t+1+k}. The heads do not read drafted
tokens, so at one depth all nodes have the same distribution. Node (i_1, ..., i_j) of the authors' static tree
(`trees.medusa()`) is the i_j-th most likely token of head j.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q). The
paper's typical acceptance is `verifiers.typical`, lossy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import layers as L
from specjax.models.heads.blocks import DraftVocabulary, bind, by_depth, draft_depths, last_entry, unembed
from specjax.models.heads.contract import FeaturePairs, Head, HeadKind
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="medusa",
    summary="drafts several tokens at once, with one output head per depth on the target's last hidden state",
    paper="Cai et al. 2024, arXiv 2401.10774",
    options=shared.head_options(),
    cpu_options={"num_tokens": 3},
    wide_tree="top:8x2x1",
    takes=frozenset({"costs"}),
    **shared.HEAD,
)


@dataclass(frozen=True)
class MedusaConfig:
    """Shapes of a set of Medusa heads."""

    width: int
    vocab_size: int
    num_heads: int
    num_blocks: int = 1
    bias: bool = True
    own_head: bool = True  # has its own output layers; False: the target's
    draft_vocab_size: int = 0  # number of ids that they can draft; 0: all
    dtype: str = "float32"

    @property
    def is_trimmed(self) -> bool:
        """Return True if it can draft only a subset of the target's ids."""
        return 0 < self.draft_vocab_size < self.vocab_size


class MedusaBranch(nnx.Module):
    """A head of Medusa. New blocks are the identity, so it starts as its output layer alone."""

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


class MedusaStates(NamedTuple):
    """The inputs of output layers."""

    z: Array  # [B, R, D]
    branch: Array  # int32[B, R], the head of each state


class Medusa(nnx.Module):
    """All heads of a model."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.branches = nnx.List([MedusaBranch(config, rngs) for _ in range(config.num_heads)])
        self.vocabulary = DraftVocabulary(config.vocab_size, config.draft_vocab_size) if config.is_trimmed else None

    def states(self, feature: Array) -> MedusaStates:
        """Return the states of all heads from the feature [B, D]."""
        z = jnp.stack([branch(feature.astype(self.config.dtype)) for branch in self.branches], 1)
        return MedusaStates(z, jnp.broadcast_to(jnp.arange(z.shape[1]), z.shape[:2]))

    def logits(self, states: MedusaStates, context: Context) -> Array:
        """Return the logits float32[B, R, V] of R states."""
        z, branch = states
        if not self.config.own_head:
            return unembed(z, context)
        return self._spread(by_depth(len(self.branches), branch, lambda i: self._own_logits(i, z), lowest=0))

    def all_logits(self, states: MedusaStates, context: Context) -> Array:
        """Return the logits float32[B, K, V] of the states of all heads in order."""
        if not self.config.own_head:
            return unembed(states.z, context)
        rows = [self._own_logits(i, states.z[:, i]) for i in range(len(self.branches))]
        return self._spread(jnp.stack(rows, 1))

    def _own_logits(self, branch: int, z: Array) -> Array:
        head = self.branches[branch].head
        assert head is not None
        return head.logits(z)

    def _spread(self, logits: Array) -> Array:
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)


@functools.cache
def medusa_head(config: MedusaConfig) -> Head:
    """Return the functions of Medusa's heads. Their memory stores the last feature [B, D]."""
    module_of = bind(Medusa, config)

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, config.width), config.dtype)

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return last_entry(pairs.features, pairs.count, last)

    drafting = draft_depths(
        lambda params, last, context: module_of(params).states(last),
        lambda params, states, context: module_of(params).logits(states, context),
        lambda params, states, context: module_of(params).all_logits(states, context),
    )
    return Head(
        init_memory, read, kind="medusa", config=config, max_depth=config.num_heads, is_single_pass=True, **drafting
    )


def of_target(target: LlamaConfig, *, num_heads: int = 4, **changes) -> MedusaConfig:
    """Return the shapes that the authors train for a target: heads with its full vocabulary, one block each."""
    return MedusaConfig(target.width, target.vocab_size, num_heads, dtype=target.dtype, **changes)


KIND = HeadKind(METHOD, Medusa, medusa_head, of_target, ("num_heads",))
