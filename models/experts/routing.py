"""Routing: the experts of each row, and their weights, from the logits of the router.

Families differ in the scores, in what the choice reads, and in the weights:

| family | scores | choice | weights |
|---|---|---|---|
| Mixtral, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE | softmax over all | top k | divided by their sum |
| OLMoE, DeepSeek-V2 | softmax over all | top k, of the best groups in V2 | times a constant |
| Granite, gpt-oss | logits | top k | softmax over the chosen |
| DeepSeek-V3, GLM-4.5 | sigmoid | top k of scores + correction, of the best groups | scores / sum, times a constant |

All arithmetic is float32. The experts of a row are in ascending order, which is the order of their sum.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Array


class Routing(NamedTuple):
    """Rules of a router."""

    num_chosen: int  # experts of a row
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalized: bool = False  # weights are divided by their sum
    epsilon: float = 0.0  # added to that sum
    scale: float = 1.0  # on the weights
    num_groups: int = 1  # equal groups of neighbouring experts
    num_chosen_groups: int = 1  # experts of other groups are not chosen
    group_score: Literal["maximum", "two_best"] = "maximum"  # of the scores of its experts; or the sum of the two best


class ExpertChoice(NamedTuple):
    """The experts of each row in ascending order, and their weights."""

    experts: Array  # int32[R, k]
    weights: Array  # float32[R, k]


def choose(
    logits: Array, routing: Routing, correction: Array | None = None, order: Array | None = None
) -> ExpertChoice:
    """Return the experts of each row of router logits float[R, E].

    Args:
      correction: float[E], added to the scores for the choice only; None: nothing is added.
      order: int32[E], the number of each expert before a permutation, by which experts belong to groups; None: they
        are in order.
    """
    logits = logits.astype(jnp.float32)
    scores = _scores(logits, routing)
    ranked = scores if correction is None else scores + correction.astype(jnp.float32)
    experts = jnp.sort(jax.lax.top_k(_best_groups(ranked, routing, order), routing.num_chosen)[1], -1)
    weights = jnp.take_along_axis(scores, experts, -1)
    if routing.scores == "softmax_of_chosen":
        weights = jax.nn.softmax(weights, -1)
    if routing.normalized:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + routing.epsilon)
    return ExpertChoice(experts, weights * routing.scale)


def _scores(logits: Array, routing: Routing) -> Array:
    if routing.scores == "softmax":
        return jax.nn.softmax(logits, -1)
    return jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else logits


def _best_groups(scores: Array, routing: Routing, order: Array | None) -> Array:
    """Return scores [R, E] with minus infinity outside of the best groups of each row."""
    if routing.num_groups == 1:
        return scores
    if order is not None:
        return _best_groups(scores[:, jnp.argsort(order)], routing, None)[:, order]
    grouped = scores.reshape(len(scores), routing.num_groups, -1)
    best_scores = jax.lax.top_k(grouped, 1 if routing.group_score == "maximum" else 2)[0]
    best = jax.lax.top_k(jnp.sum(best_scores, -1), routing.num_chosen_groups)[1]  # int32[R, groups]
    is_best = jnp.any(best[..., None] == jnp.arange(routing.num_groups), 1)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)
