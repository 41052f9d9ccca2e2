"""Parallel Prompt Decoding (PPD): trained vectors below a token, at which the frozen target predicts later tokens.

Chen, Luk, Yiu, Li, Mishchenko, Venieris, Fan: Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration
of LLM Inference (2024), arXiv 2405.18628.

Rule: below token t are P_1, ..., P_m at the positions t + 1, ..., t + m. Each attends to the text up to t and to the
earlier prompts. At t the target predicts x_{t+1}, and at P_i it predicts x_{t+1+i}. In an ensemble of e copies (EPT)
each copy attends to itself only, and the logits of all copies are averaged. The trees that are drafted with these
predictions, the guarantee and the deviations are in `specjax.drafters.heads.ppd`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit
from specjax.catalog import Method, Option
from specjax.models import layers as L
from specjax.models.heads.agreement import prompted_features, read_text
from specjax.models.heads.blocks import DepthLogits, bind, follow_depths, last_entry, unembed
from specjax.models.heads.contract import DraftHead, FeaturePairs, Head, HeadKind
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, Target

METHOD = Method(
    name="ppd",
    kind="drafter",
    guarantee="distribution",
    summary="adds trained prompt vectors to the target pass, whose outputs at these vectors are the next draft",
    paper="Chen et al. 2024, arXiv 2405.18628",
    needs=frozenset({"head"}),
    takes=frozenset({"costs"}),
    options=(
        Option("num_nodes", "int", None, "tokens of a pass, prompts included; default: 16 on CPU, else 64"),
        Option(
            "accuracy", "rows_of_floats", None, "fraction of correct guesses, by distance and rank; default: assumed"
        ),
    ),
    alone=True,
    arguments=("draft",),
)


@dataclass(frozen=True)
class PpdConfig:
    """Shapes of a set of prompts."""

    width: int
    num_prompts: int = 3  # m, number of tokens ahead
    copies: int = 1  # e, copies of the ensemble
    dtype: str = "float32"


class Ppd(nnx.Module):
    """The prompts. The prompt of distance i and copy j is row i e + j."""

    def __init__(self, config: PpdConfig, *, rngs: nnx.Rngs):
        c = config
        self.prompts = L.Embedding(c.num_prompts * c.copies, c.width, dtype=c.dtype, rngs=rngs)


@functools.cache
def ppd_head(config: PpdConfig) -> Head:
    """Return the functions of prompts. Their memory: the target's outputs [B, m e D] at the prompts before the root."""
    module_of, c = bind(Ppd, config), config

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, c.num_prompts * c.copies * c.width), c.dtype)

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return last_entry(pairs.features, pairs.count, last)

    def start(params, last: Array, context: Context, places: int) -> tuple[DepthLogits, Array]:
        hidden = last.reshape(len(last), c.num_prompts, c.copies, c.width)
        logits = jnp.mean(unembed(hidden, context), 2)
        return DepthLogits(logits), logits[:, 0]

    def soft_prompts(params) -> Array:
        return module_of(params).prompts.weight[...].reshape(c.num_prompts, c.copies, c.width)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow_depths,
        kind="ppd",
        config=config,
        max_depth=c.num_prompts,
        soft_prompts=soft_prompts,
        is_single_pass=True,
    )


def prompts_of_token(target: Target, token: int, num_prompts: int = 3) -> DraftHead:
    """Return prompts that all equal the embedding of one token, such as the [PAD] of `specjax.decoders.lud`."""
    assert target.model.embed is not None
    [[row]] = target.model.embed(target.params, jnp.full((1, 1), token, jnp.int32))
    config = PpdConfig(row.shape[0], num_prompts, dtype=str(row.dtype))
    return DraftHead(ppd_head(config), {"prompts": {"weight": jnp.tile(row, (num_prompts, 1))}})


def rank_accuracy(
    target: Target, head: DraftHead, tokens: Sequence[int], ranks: int = 10
) -> tuple[tuple[float, ...], ...]:
    """Measure on a text how often the guess of each rank is the target's token, as [m][ranks] by distance.

    The most likely next tokens of the target at the text's positions serve as the text that it would generate.
    """
    text = read_text(target, tokens, [head])
    return tuple(tuple(row) for row in np.asarray(_hits(target, head, text.tokens, text.best, ranks)).tolist())


@jit(static_argnames="ranks")
def _hits(target: Target, head: DraftHead, tokens: Array, best: Array, ranks: int) -> Array:
    """Return the accuracy float32[m, ranks]."""
    c, size, context = head.head.config, tokens.shape[1], Context(tokens, jnp.ones((1,), jnp.int32), target=target)
    hidden = prompted_features(target, head, tokens).reshape(size, c.num_prompts, c.copies, c.width)
    logits = jnp.mean(unembed(hidden, context), 2)  # [T, m, V]
    place = jnp.arange(size)[:, None] + 1 + jnp.arange(c.num_prompts)  # position in `best` of the token above
    expected = best[jnp.minimum(place, size - 1)]
    rank = jnp.sum(logits > take_along(logits, expected[:, :, None], 2), 2)
    hits = (rank[:, :, None] == jnp.arange(ranks)) & (place < size)[:, :, None]
    return jnp.sum(hits, 0) / jnp.maximum(jnp.sum(place < size, 0), 1)[:, None]


def of_target(target: LlamaConfig, **changes) -> PpdConfig:
    """Return the shapes that the authors serve for a target: three prompts of one copy."""
    return PpdConfig(target.width, dtype=target.dtype, **changes)


KIND = HeadKind(METHOD, Ppd, ppd_head, of_target, ("num_prompts", "copies"))
