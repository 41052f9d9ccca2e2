"""Segmentation of texts into pieces that a model writes in one step: HAMburger's segments and lexical units."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.adaptive.optimise import one_pass
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit
from specjax.types import Array, Model, Target


def find_starts(
    values: Array, joins: Callable[[Array, Array], Array], max_length: int, forced: Array | None = None
) -> Array:
    """Return bool[B, T], True for tokens that begin a piece.

    Args:
      values: float32[B, T], one per token.
      joins: (value of a token, largest value of the piece so far) -> bool[B], True if the token may join the piece.
      max_length: limit of tokens per piece. forced: bool[B, T], True for tokens that must begin a piece.
    """

    def step(carry, inputs):
        largest, size = carry
        value, is_forced = inputs
        starts = is_forced | (size == max_length) | ~joins(value, largest)
        return (jnp.where(starts, value, jnp.maximum(largest, value)), jnp.where(starts, 1, size + 1)), starts

    if forced is None:
        forced = jnp.zeros(values.shape, bool)
    forced = forced.at[:, 0].set(True)
    empty = values[:, 0], jnp.zeros(len(values), jnp.int32)
    return jax.lax.scan(step, empty, (values.T, forced.T))[1].T


def split_by_entropy(
    entropies: Array, *, max_length: int = 4, threshold: float = 0.05, share: float = 0.3, forced: Array | None = None
) -> Array:
    """Return bool[B, T], the starts of HAMburger's segments (arXiv 2505.20438; "decreasing_v2" in the authors' code).

    A token joins a segment if its entropy is below `threshold`, or below `share` of the segment's largest entropy.
    """
    joins = lambda value, largest: (value < threshold) | (value < share * largest)
    return find_starts(entropies, joins, max_length, forced)


def split_by_confidence(confidences: Array, *, max_length: int = 4, threshold: float = 0.9) -> Array:
    """Return bool[B, T], the starts of lexical units (arXiv 2405.15208).

    A unit is the longest run of tokens in which all but the first have a probability of at least `threshold`.
    """
    return find_starts(confidences, lambda value, largest: value >= threshold, max_length)


def score_tokens(target: Target, tokens: Array) -> tuple[Array, Array]:
    """Return (probabilities, entropies), float32[B, T] each, of the tokens of texts int32[B, T].

    The entropy is that of the distribution that predicts the token. The first token of a text has probability 0 and the
    largest possible entropy.
    """
    return _score_tokens(target.model, target.params, tokens)


@jit(static_argnums=0)
def _score_tokens(model: Model, params, tokens: Array) -> tuple[Array, Array]:
    logits = one_pass(model, params, tokens, model.init_cache(params, None, len(tokens), 0))[0].logits[:, :-1]
    log_p = jax.nn.log_softmax(logits)
    probability = jnp.exp(take_along(log_p, tokens[:, 1:, None], 2)[..., 0])
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    prepend = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
    return prepend(probability, 0.0), prepend(entropy, math.log(model.vocab_size))
