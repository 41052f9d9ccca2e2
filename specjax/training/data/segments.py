"""Where texts are cut into pieces that are written at once: HAMburger's segments and lexical units."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.adaptive.optimise import one_pass
from specjax.arrays.indexing import take_along
from specjax.types import Array, Model, Target


def starts(values: Array, joins: Callable[[Array, Array], Array], longest: int, alone: Array | None = None) -> Array:
    """bool[B, T]: which tokens begin a piece.

    Args:
      values: float32[B, T], of each token. joins: (its value, the largest of the piece so far) -> bool[B], whether it
        may join that piece. longest: tokens of a piece. alone: bool[B, T], tokens that begin one in any case.
    """

    def step(carry, now):
        largest, size = carry
        value, begins = now
        new = begins | (size == longest) | ~joins(value, largest)
        return (jnp.where(new, value, jnp.maximum(largest, value)), jnp.where(new, 1, size + 1)), new

    if alone is None:
        alone = jnp.zeros(values.shape, bool)
    alone = alone.at[:, 0].set(True)
    nothing = values[:, 0], jnp.zeros(len(values), jnp.int32)
    return jax.lax.scan(step, nothing, (values.T, alone.T))[1].T


def by_entropy(entropies: Array, *, longest: int = 4, least: float = 0.05, share: float = 0.3, alone=None) -> Array:
    """bool[B, T]: segments of HAMburger (arXiv 2505.20438), "decreasing_v2" in its authors' code: a token joins where
    its entropy is below `least`, or below `share` of the largest of the segment."""
    return starts(entropies, lambda value, largest: (value < least) | (value < share * largest), longest, alone)


def by_confidence(confidences: Array, *, longest: int = 4, threshold: float = 0.9) -> Array:
    """bool[B, T]: lexical units (arXiv 2405.15208), the longest runs of which every token but the first was held as
    likely as `threshold`."""
    return starts(confidences, lambda value, largest: value >= threshold, longest)


def told(target: Target, tokens: Array) -> tuple[Array, Array]:
    """float32[B, T] each: how likely the target held each token of the texts int32[B, T], and the entropy there.

    Of the first token of a text it says nothing: 0 and the largest entropy.
    """
    return _told(target.model, target.params, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _told(model: Model, params, tokens: Array) -> tuple[Array, Array]:
    logits = one_pass(model, params, tokens, model.init_cache(params, None, len(tokens), 0))[0].logits[:, :-1]
    log_p = jax.nn.log_softmax(logits)
    of_text = jnp.exp(take_along(log_p, tokens[:, 1:, None], 2)[..., 0])
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    first = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
    return first(of_text, 0.0), first(entropy, math.log(model.vocab_size))
