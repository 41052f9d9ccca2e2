"""Loss of a draft head: the distance of its drafts from the target, with statistics by depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models.heads.blocks import unembed
from specjax.models.heads.contract import Head
from specjax.training.objectives import losses
from specjax.training.objectives.chunks import map_in_chunks
from specjax.training.objectives.recipes import Recipe, resolve_depths
from specjax.training.objectives.unroll import DepthOutput, Rounds, unroll_rounds
from specjax.types import Array, Context, PyTree, Target


class DepthSums(NamedTuple):
    """Sums over rounds by depth, float32[K] each."""

    loss: Array
    weight: Array  # rounds that count
    hits: Array  # rounds whose most likely token was the text's
    reached: Array  # rounds in which this token and all earlier ones were the text's
    features: Array  # loss of predicted features
    confidence: Array  # loss of the predicted acceptance
    draftable: Array  # rounds whose token the head can draft
    statistics: Array  # float32[K, S], see `losses.sum_statistics`

    def means(self) -> Array:
        """Return float32[K, S], the batch means that the losses read."""
        return self.statistics / jnp.maximum(self.draftable, 1e-9)[:, None]


class StepReport(NamedTuple):
    """Statistics of a step by depth, float32[K] each."""

    loss: Array
    accuracy: Array  # share of rounds whose most likely token is the text's, given the text before it
    reached: Array  # share of rounds that are correct up to this depth
    tokens: Array  # float32[], rounds that count


def sum_head_losses(
    recipe: Recipe,
    head: Head,
    params: PyTree,
    target: Target,
    rounds: Rounds,
    chunk: int | None = None,
    means: Array | None = None,
) -> DepthSums:
    """Return the sums of the losses over some rounds. The arguments are those of `unroll_rounds`.

    Args: means: `DepthSums.means` of the whole step; None: those of these rounds.

    Raises: UsageError if the recipe has a loss for an output that the head lacks.
    """
    _check_outputs(recipe, head)

    def judge(outputs: list[DepthOutput]) -> DepthSums:
        teacher = [_teacher_logits(target, depth, rounds.ids) if recipe.reads_teacher else None for depth in outputs]
        return _sum_losses(recipe, head, outputs, teacher, means)

    depths = head_depths(recipe, head) if rounds.skipped is None else 1
    return unroll_rounds(head, params, target, rounds, depths, judge, chunk)


def compute_head_loss(recipe: Recipe, total: DepthSums) -> tuple[Array, StepReport]:
    """Return (float32[], statistics) from the sums of a whole step."""
    depths, count = len(total.weight), jnp.maximum(total.weight, 1.0)
    share = jnp.ones(depths) if recipe.weighting == "d_pace" else losses.depth_decay(depths, recipe.decay)
    each = total.loss + recipe.features * total.features + recipe.confidence * total.confidence
    report = StepReport(total.loss / count, total.hits / count, total.reached / count, total.weight[0])
    return jnp.sum(share * each / count), jax.lax.stop_gradient(report)


def head_depths(recipe: Recipe, head: Head) -> int:
    """Return the drafted tokens per round of a head. Raises: UsageError for more than it drafts."""
    default = head.trained_depth or recipe.passes * head.levels_per_pass
    return resolve_depths(recipe, head.kind, head.max_depth, default)


def _check_outputs(recipe: Recipe, head: Head) -> None:
    for name in ("anchors", "draws_depth"):
        if getattr(recipe, name) and not head.reads_keys:
            raise UsageError(
                f"a head of kind {head.kind} reads no keys of the target, but the recipe has {name}=True; set it to "
                "False"
            )
    for name, share, has_output in (
        ("features", recipe.features, head.feature is not None),
        ("confidence", recipe.confidence, getattr(head.config, "confidence", "no") != "no"),
    ):
        if share and not has_output:
            raise UsageError(
                f"a head of kind {head.kind} predicts no {name}, but the recipe has {name}={share}; set it to 0"
            )


def _sum_losses(
    recipe: Recipe, head: Head, outputs: list[DepthOutput], teacher: list[Array | None], means: Array | None
) -> DepthSums:
    size = outputs[0].logits.shape[-1]
    counted = jnp.stack([depth.weight for depth in outputs])
    draftable = jnp.stack([depth.label < size for depth in outputs])
    weight = counted * draftable
    loss_of = losses.combined(recipe.losses)
    parts = list(zip(outputs, teacher, weight, strict=True))
    mean_of = lambda k: None if means is None else means[k]
    loss = jnp.stack([loss_of(depth.logits, p, depth.label, w, mean_of(k)) for k, (depth, p, w) in enumerate(parts)])
    statistics = jnp.stack([losses.sum_statistics(recipe.losses, depth.logits, p, w) for depth, p, w in parts])
    share = weight
    if recipe.weighting == "d_pace":
        surprise = [losses.cross_entropy(depth.logits, None, depth.label, depth.weight) for depth in outputs]
        # Tokens that the head cannot draft are never correct. After the end of a text no draft can become longer.
        share = weight * losses.d_pace(jnp.where(draftable, -jnp.stack(surprise), -jnp.inf), counted)
    hits = jnp.stack([jnp.argmax(depth.logits, -1) == depth.label for depth in outputs])
    reached = jnp.cumprod(hits & (counted > 0), 0)
    sums = lambda x: jnp.sum(x * counted, 1)
    features = confidence = jnp.zeros(len(outputs), jnp.float32)
    if recipe.features:
        features = sums(jnp.stack([_feature_loss(head, depth, k) for k, depth in enumerate(outputs)]))
    if recipe.confidence:
        confidence = sums(_confidence_loss(outputs, teacher, hits, draftable))
    return DepthSums(
        jnp.sum(share * loss, 1), jnp.sum(counted, 1), sums(hits), sums(reached), features, confidence,
        jnp.sum(weight, 1), statistics,
    )  # fmt: skip


def _teacher_logits(target: Target, depth: DepthOutput, ids: Array | None) -> Array:
    """Return float32[N, v], the target's logits of the tokens that the head drafts."""
    logits_of = lambda target: unembed(depth.hidden, Context(depth.label[:, None], depth.label, target=target))
    if ids is None:
        return jax.lax.stop_gradient(logits_of(target))
    size = depth.logits.shape[-1]
    drafted = jnp.zeros((size + 1,), jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))[:size]
    restricted = _restrict_outputs(target, drafted)
    logits = logits_of(target)[:, drafted] if restricted is None else logits_of(restricted)
    return jax.lax.stop_gradient(logits)


def _restrict_outputs(target: Target, ids: Array) -> Target | None:
    """Return the target with logits of only these tokens, or None if its output is not a single table.

    With 4,096 of 49,152 tokens, nine tenths of a step would otherwise be spent on logits that are not used.
    """
    params: Any = target.params
    name = next((name for name in ("head", "embed") if isinstance(params, dict) and name in params), None)
    if name is None or set(params[name]) != {"weight"} or target.model.mesh is not None:
        return None
    return dataclasses.replace(target, params=params | {name: {"weight": params[name]["weight"][ids]}})


def _feature_loss(head: Head, depth: DepthOutput, k: int) -> Array:
    """Return float32[N], the distance of the feature predicted at depth k from the target's."""
    assert head.feature is not None
    return losses.smooth_l1(head.feature(depth.scratch, k), depth.hidden)


def _confidence_loss(outputs: list[DepthOutput], teacher: list[Array | None], hits: Array, draftable: Array) -> Array:
    """Return float32[K, N], the cross entropy of the predicted acceptance.

    Args: draftable: bool[K, N], True where the head can draft the text's token. The teacher's distribution covers only
      such tokens, so the acceptance is 0 elsewhere.
    """

    def acceptance(depth: DepthOutput, p: Array | None, hit: Array, can_draft: Array) -> Array:
        if p is None:
            return hit.astype(jnp.float32)
        variation = losses.total_variation(depth.logits, p, depth.label, depth.weight)
        return jax.lax.stop_gradient(can_draft * (1 - variation))

    parts = [
        losses.binary_cross_entropy(jnp.ravel(depth.confidence), acceptance(depth, p, hit, can_draft))
        for depth, p, hit, can_draft in zip(outputs, teacher, hits, draftable, strict=True)
        if depth.confidence is not None
    ]
    return jnp.stack(parts)


def chain_acceptance(
    head: Head,
    params: PyTree,
    target: Target,
    rounds: Rounds,
    depths: int,
    temperature: float,
    chunk: int | None = None,
) -> Array:
    """Return float32[B, R, K], the probability that each draft of a round is accepted, if all earlier ones are.

    The tokens of the text x are those that the target drew. At temperature 0 the probability is 1 where the draft is
    right. Else the standard rule accepts the draft x with probability min(1, q(x) / p(x)), given that the text is x.
    """

    def judge(outputs: list[DepthOutput]) -> Array:
        scores = [_score(depth, temperature) for depth in outputs]
        return jnp.stack(scores, 1).reshape(len(rounds.positions), -1, depths)

    scores = unroll_rounds(head, params, target, rounds, depths, judge, chunk, over=map_in_chunks)
    if not temperature:
        return scores
    tokens = jnp.asarray(rounds.packed.tokens)
    unembed_target = lambda hidden: unembed(hidden, Context(tokens, tokens[:, 0], target=target))
    log_p = text_log_probabilities(unembed_target, rounds.activations.hidden, tokens, temperature)
    column = jnp.maximum(rounds.positions, 0)[:, :, None] + 2 + jnp.arange(depths)
    log_p = take_along(log_p[:, :, None], jnp.minimum(column, tokens.shape[1] - 1).reshape(len(tokens), -1, 1), 1)
    return jnp.exp(jnp.minimum(scores - log_p.reshape(scores.shape), 0.0))


def _score(depth: DepthOutput, temperature: float) -> Array:
    """Return float32[N]: 1 if the likeliest draft is the label, else 0; or at a temperature log q of the label."""
    is_drafted = (depth.weight > 0) & (depth.label < depth.logits.shape[-1])
    if not temperature:
        return (is_drafted & (jnp.argmax(depth.logits, -1) == depth.label)).astype(jnp.float32)
    log_q = -losses.cross_entropy(depth.logits / temperature, None, depth.label, depth.weight)
    return jnp.where(is_drafted, log_q, -jnp.inf)


LOGIT_POSITIONS = 64  # positions of a text whose logits are computed together


def text_log_probabilities(
    unembed: Callable[[Array], Array], hidden: Array, tokens: Array, temperature: float
) -> Array:
    """Return float32[B, T], log p of each token of the texts int32[B, T] at a temperature. The first column is 0.

    Args: unembed: hidden states [..., D] -> logits. hidden: [B, T, D], from which the next token is predicted.
    """

    def score(inputs: tuple[Array, Array]) -> Array:
        states, token = inputs
        return -losses.cross_entropy(unembed(states).astype(jnp.float32) / temperature, None, token, token)

    by_column = hidden[:, :-1].swapaxes(0, 1), tokens[:, 1:].swapaxes(0, 1)
    return jnp.pad(jax.lax.map(score, by_column, batch_size=LOGIT_POSITIONS).swapaxes(0, 1), ((0, 0), (1, 0)))
