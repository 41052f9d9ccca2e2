"""Parallel Prompt Decoding (PPD): trained vectors below a token, of which the frozen target says the tokens after next.

Chen, Luk, Yiu, Li, Mishchenko, Venieris, Fan: Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration
of LLM Inference (2024), arXiv 2405.18628. Below token t stand P_1, ..., P_m, at the positions t + 1, ..., t + m; each
sees the text as far as t and those before it. Where the target says x_{t+1} of t, it says x_{t+1+i} of P_i. Of an
ensemble of e copies (EPT) each sees its own alone, and their logits are averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.arrays.indexing import take_along
from specjax.models import layers as L
from specjax.models.heads.agreement import prompted_features, read_text
from specjax.models.heads.blocks import bind, newest, unembed
from specjax.models.heads.contract import DraftedNodes, DraftHead, Head, FeaturePairs
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, Target


@dataclass(frozen=True)
class PpdConfig:
    """Shapes of a set of prompts."""

    width: int
    num_prompts: int = 3  # m, how many tokens ahead
    copies: int = 1  # e, of the ensemble
    dtype: str = "float32"


class Ppd(nnx.Module):
    """The prompts. Those of one distance stand together: that of distance i and copy j is row i e + j."""

    def __init__(self, config: PpdConfig, *, rngs: nnx.Rngs):
        c = config
        self.prompts = L.Embedding(c.num_prompts * c.copies, c.width, dtype=c.dtype, rngs=rngs)


class Scratch(NamedTuple):
    logits: Array  # float32[B, m, V], by depth


@functools.cache
def ppd_head(config: PpdConfig) -> Head:
    """The functions of prompts. Memory: what the target made of those below the token before the root, [B, m e D]."""
    module_of, c = bind(Ppd, config), config

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, c.num_prompts * c.copies * c.width), c.dtype)

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return newest(pairs.features, pairs.count, last)

    def start(params, last: Array, context: Context, places: int) -> tuple[Scratch, Array]:
        hidden = last.reshape(len(last), c.num_prompts, c.copies, c.width)
        logits = jnp.mean(unembed(hidden, context), 2)
        return Scratch(logits), logits[:, 0]

    def follow(params, scratch: Scratch, drafted: DraftedNodes, context: Context) -> tuple[Scratch, Array]:
        return scratch, take_along(scratch.logits, drafted.depth[:, :, None], 1)

    def soft_prompts(params) -> Array:
        return module_of(params).prompts.weight[...].reshape(c.num_prompts, c.copies, c.width)

    return Head(
        init_memory, read, start, follow, "ppd", config, max_depth=c.num_prompts, soft_prompts=soft_prompts, is_single_pass=True
    )  # fmt: skip


def prompts_of_token(target: Target, token: int, num_prompts: int = 3) -> DraftHead:
    """Prompts that are all the embedding of one token, such as the [PAD] of `specjax.decoders.lud`."""
    assert target.model.embed is not None
    [[row]] = target.model.embed(target.params, jnp.full((1, 1), token, jnp.int32))
    config = PpdConfig(row.shape[0], num_prompts, dtype=str(row.dtype))
    return DraftHead(ppd_head(config), {"prompts": {"weight": jnp.tile(row, (num_prompts, 1))}})


def rank_accuracy(
    target: Target, head: DraftHead, tokens: Sequence[int], ranks: int = 10
) -> tuple[tuple[float, ...], ...]:
    """[m][ranks]: how often the guess of this rank is the target's token, at each distance, on a text.

    What the target finds likeliest after the text's own tokens stands for what it would write.
    """
    text = read_text(target, tokens, [head])
    return tuple(tuple(row) for row in np.asarray(_hits(target, head, text.tokens, text.best, ranks)).tolist())


@functools.partial(jax.jit, static_argnames="ranks")
def _hits(target: Target, head: DraftHead, tokens: Array, best: Array, ranks: int) -> Array:
    """float32[m, ranks]."""
    c, size, context = head.head.config, tokens.shape[1], Context(tokens, jnp.ones((1,), jnp.int32), target=target)
    hidden = prompted_features(target, head, tokens).reshape(size, c.num_prompts, c.copies, c.width)
    logits = jnp.mean(unembed(hidden, context), 2)  # [T, m, V]
    place = jnp.arange(size)[:, None] + 1 + jnp.arange(c.num_prompts)  # of the token above, in `best`
    right = best[jnp.minimum(place, size - 1)]
    rank = jnp.sum(logits > take_along(logits, right[:, :, None], 2), 2)
    hits = (rank[:, :, None] == jnp.arange(ranks)) & (place < size)[:, :, None]
    return jnp.sum(hits, 0) / jnp.maximum(jnp.sum(place < size, 0), 1)[:, None]


def of_target(target: LlamaConfig, **changes) -> PpdConfig:
    """The shapes that the authors serve for a target: three prompts of one copy."""
    return PpdConfig(target.width, dtype=target.dtype, **changes)
