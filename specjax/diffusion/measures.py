"""Confidence measures of proposals, and the ranks that rules use. Results are float32, int32 or bool [B, W]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.diffusion.types import Proposal
from specjax.numerics import sampling
from specjax.types import Array


def confidence(proposal: Proposal) -> Array:
    """Return the probability of the proposed token at temperature 1 without noise, times the score's weight."""
    return apply_weight(proposal, probability(proposal.logits, proposal.token))


def filtered_confidence(proposal: Proposal) -> Array:
    """Return the probability of the proposed token after temperature, top-k, top-p and min-p, times the score's weight.

    A temperature of 0 counts as 1.
    """
    return apply_weight(proposal, probability(proposal.filtered, proposal.token))


def drawn_confidence(proposal: Proposal) -> Array:
    """Return the probability of the proposed token under the distribution that it was drawn from, times the weight.

    At temperature 0 nothing is drawn, and it is `confidence`.
    """
    return apply_weight(proposal, probability(drawn_logits(proposal), proposal.token))


def drawn_logits(proposal: Proposal) -> Array:
    """Return the logits float32[B, W, V] that tokens were drawn from. At temperature 0 they are the plain logits."""
    return jnp.where(proposal.greedy[:, None, None], proposal.logits, proposal.warped)


def apply_weight(proposal: Proposal, measure: Array) -> Array:
    """Multiply a measure by the score's weight."""
    return measure if proposal.weight is None else measure * proposal.weight


def probability(logits: Array, token: Array) -> Array:
    """Return the probability of tokens int32[...] under logits [..., V]."""
    return jnp.exp(log_probability(logits, token))


def log_probability(logits: Array, token: Array) -> Array:
    """Return the log-probability of tokens int32[...] under logits [..., V]."""
    return take_along(logits, token[..., None], -1)[..., 0] - jax.nn.logsumexp(logits, -1)


def entropy(logits: Array) -> Array:
    """Return the entropy in nats of logits [..., V]."""
    return sampling.entropy(jax.nn.log_softmax(logits, -1))


def margin(logits: Array) -> Array:
    """Return the difference of the two largest probabilities of logits [..., V]."""
    return gap(jax.nn.softmax(logits, -1))


def gap(values: Array) -> Array:
    """Return the difference of the two largest values of [..., V]."""
    largest = jax.lax.top_k(values, 2)[0]
    return largest[..., 0] - largest[..., 1]


def rank(measure: Array, eligible: Array) -> Array:
    """Rank the eligible columns by a measure, largest first: int32[B, W]. Ties go to the lower column.

    Columns that are not eligible come last.
    """
    index = jnp.arange(measure.shape[1])
    value = jnp.where(eligible, measure, -jnp.inf)
    above = (value[:, None, :] > value[:, :, None]) | (
        (value[:, None, :] == value[:, :, None]) & (index[None, :] < index[:, None])
    )
    return jnp.sum(above & eligible[:, None, :], 2, dtype=jnp.int32) + jnp.where(eligible, 0, measure.shape[1])


def most_confident(measure: Array, eligible: Array) -> Array:
    """Return bool[B, W]: the eligible column with the largest measure."""
    return top(measure, eligible, jnp.ones((len(measure),), jnp.int32))


def top(measure: Array, eligible: Array, count: Array) -> Array:
    """Return bool[B, W]: the `count` int32[B] eligible columns with the largest measures."""
    return eligible & (rank(measure, eligible) < count[:, None])


def sort_descending(measure: Array, eligible: Array, behind: float) -> Array:
    """Return the measures of the eligible columns in descending order, then a fill value: float32[B, W]."""
    return -jnp.sort(-jnp.where(eligible, measure, behind), 1)
