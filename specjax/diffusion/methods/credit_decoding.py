"""CreditDecoding: a token that was the most likely one in earlier passes gets credit, which is added to its logit.

Wang, Jiang, Feng, Zhao, Liu, Li, Lan, Lin: CreditDecoding: Accelerating Parallel Decoding in Diffusion Large Language
Models with Trace Credit (2025), arXiv 2510.06133, as implemented in the engine dInfer.

Rule: in each pass, for every masked column with probabilities p and most likely token v,

    C <- beta C,   C[v] <- C[v] + p(v)^gamma,   logits <- logits + alpha log(1 + C).

Tokens, confidences and the threshold rule use the changed logits.
Guarantee: lossy; alpha = 0 is the threshold rule.
Deviations: each column stores only the `slots` tokens with the largest credit, and a new token replaces the smallest.
This is exact if at most `slots` tokens were the most likely one at that column. slots=0 stores a credit for every token
of the vocabulary. Credits restart in every block; dInfer clears them when a canvas is finished.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest
from specjax.catalog import Method, Option, shared
from specjax.diffusion.measures import probability
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Score, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="credit_decoding",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all confident columns; tokens that were most likely in earlier passes gain confidence",
    paper="Wang et al. 2025, arXiv 2510.06133",
    options=(
        shared.BLOCK,
        shared.tau(0.8),
        Option("alpha", "float", 0.7, "scale of the credit in the logits, times log(1 + credit)"),
        Option("beta", "float", 0.8, "decay of the credit per pass"),
        Option("gamma", "float", 0.2, "exponent of the probability that is added as credit"),
        Option("slots", "int", 8, "tokens per column with credit; 0: all"),
    ),
)


@checked
def credit_decoding(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    tau: float = 0.8,
    alpha: float = 0.7,
    beta: float = 0.8,
    gamma: float = 0.2,
    slots: int = 8,
) -> Procedure:
    """Return the procedure.

    Args:
      block: columns of a block; None: all new ones. tau: confidence at which a column is decided.
      alpha: weight of the credit. beta: decay factor of the credit per pass. gamma: power of the credited probability.
      slots: tokens per column with credit; 0: all.
    """
    return Procedure(blocks(denoiser.block or block), threshold(tau), score=credits(alpha, beta, gamma, slots))


class Sparse(NamedTuple):
    ids: Array  # int32[B, W, K], tokens that have credit; -1: none
    value: Array  # float32[B, W, K], their credits


@functools.cache
def credits(alpha: float, beta: float, gamma: float, slots: int) -> Score:
    """Return the score. Raises: UsageError for a number of slots, a beta or a gamma below 0."""
    if beta < 0 or gamma < 0:
        raise UsageError(f"beta and gamma must be at least 0, not {beta} and {gamma}")
    if slots < 0:
        raise UsageError(f"slots must be at least 1, or 0 for all tokens, not {slots}")

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> Array | Sparse:
        shape = len(canvas.tokens), width, slots or vocab
        value = jnp.zeros(shape)
        return Sparse(jnp.full(shape, -1), value) if slots else value

    def transform(params: PyTree, state: Array | Sparse, logits: Array, view: View) -> tuple[Array, Array | Sparse]:
        best = first_largest(logits)
        gain = jnp.where(view.eligible, probability(logits, best) ** gamma, 0.0)
        state = jax.tree.map(functools.partial(_cleared, view.entered), state)
        if isinstance(state, Sparse):
            state = _credited(state, best, gain, beta)
            batch, width, vocab = logits.shape
            row, column = jnp.arange(batch)[:, None, None], jnp.arange(width)[:, None]
            place = jnp.where(state.ids < 0, vocab, state.ids)
            return logits.at[row, column, place].add(alpha * jnp.log1p(state.value), mode="drop"), state
        mine = jnp.arange(logits.shape[-1]) == best[..., None]
        state = beta * state + jnp.where(mine, gain[..., None], 0.0)
        return logits + alpha * jnp.log1p(state), state

    return Score(transform, init=init)


def _cleared(entered: Array, x: Array) -> Array:
    """Clear the credit of rows that have entered a new window."""
    return jnp.where(entered[:, None, None], -1 if x.dtype == jnp.int32 else 0, x)


def _credited(state: Sparse, best: Array, gain: Array, beta: float) -> Sparse:
    """Return the credit after a pass in which `best` gains."""
    value = beta * state.value
    stored = state.ids == best[..., None]
    slot = jnp.where(jnp.any(stored, -1), jnp.argmax(stored, -1), jnp.argmin(value, -1))
    match = (jnp.arange(value.shape[-1]) == slot[..., None]) & (gain > 0)[..., None]
    value = jnp.where(match, jnp.where(stored, value, 0.0) + gain[..., None], value)
    return Sparse(jnp.where(match, best[..., None], state.ids), value)
