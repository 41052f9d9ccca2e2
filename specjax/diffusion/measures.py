"""How sure a model is of what it proposes, and the ranks that rules count by. All float32 or int32 [B, W]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.diffusion.types import Proposal
from specjax.numerics import sampling
from specjax.types import Array


def confidence(proposal: Proposal) -> Array:
    """Probability of the proposed token, at temperature 1 and without noise, times the score's weight."""
    return weighed(proposal, probability(proposal.logits, proposal.token))


def warped_confidence(proposal: Proposal) -> Array:
    """Probability of the proposed token in the distribution that it was drawn from, times the score's weight."""
    return weighed(proposal, probability(drawn_from(proposal), proposal.token))


def drawn_from(proposal: Proposal) -> Array:
    """float32[B, W, V]: the warped logits or, where these leave one token alone and say nothing of how sure the model
    is (a temperature of 0), those before."""
    alone = jnp.sum(proposal.warped > -jnp.inf, -1, keepdims=True) < 2
    return jnp.where(alone, proposal.logits, proposal.warped)


def weighed(proposal: Proposal, measure: Array) -> Array:
    """A measure times the score's weight."""
    return measure if proposal.weight is None else measure * proposal.weight


def probability(logits: Array, token: Array) -> Array:
    """Of tokens int32[...] under logits [..., V]."""
    return jnp.exp(log_probability(logits, token))


def log_probability(logits: Array, token: Array) -> Array:
    """Its logarithm."""
    return take_along(logits, token[..., None], -1)[..., 0] - jax.nn.logsumexp(logits, -1)


def entropy(logits: Array) -> Array:
    """In nats, of logits [..., V]."""
    return sampling.entropy(jax.nn.log_softmax(logits, -1))


def margin(logits: Array) -> Array:
    """The largest probability less the second, of logits [..., V]."""
    return gap(jax.nn.softmax(logits, -1))


def gap(values: Array) -> Array:
    """The largest less the second, of values [..., V]."""
    largest = jax.lax.top_k(values, 2)[0]
    return largest[..., 0] - largest[..., 1]


def rank(measure: Array, eligible: Array) -> Array:
    """int32[B, W]: how many eligible columns come before each by a measure, the largest first and of equal ones the
    lower column; columns that are not eligible come last."""
    index = jnp.arange(measure.shape[1])
    value = jnp.where(eligible, measure, -jnp.inf)
    above = (value[:, None, :] > value[:, :, None]) | (
        (value[:, None, :] == value[:, :, None]) & (index[None, :] < index[:, None])
    )
    return jnp.sum(above & eligible[:, None, :], 2, dtype=jnp.int32) + jnp.where(eligible, 0, measure.shape[1])


def surest(measure: Array, eligible: Array) -> Array:
    """bool[B, W]: the eligible column of the largest measure."""
    return top(measure, eligible, jnp.ones((len(measure),), jnp.int32))


def top(measure: Array, eligible: Array, count: Array) -> Array:
    """bool[B, W]: the `count` int32[B] eligible columns of the largest measure."""
    return eligible & (rank(measure, eligible) < count[:, None])


def sorted_down(measure: Array, eligible: Array, behind: float) -> Array:
    """float32[B, W]: the measure of the eligible columns from the largest on, then `behind`."""
    return -jnp.sort(-jnp.where(eligible, measure, behind), 1)
