"""How far a head's drafts are from the target, as one number with derivatives, and what is worth watching beside it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.heads.blocks import unembed
from specjax.models.heads.contract import Head
from specjax.training.data.packing import Lesson
from specjax.training.objectives import losses
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.unroll import Depth, Reading, rounds
from specjax.types import Array, Context, PyTree, Target


class Sums(NamedTuple):
    """Over rounds, by depth: float32[K] each."""

    loss: Array
    weight: Array  # how many rounds count
    hits: Array  # in which the likeliest draft was the token that followed
    reached: Array  # in which it and all before it were
    features: Array
    confidence: Array


class Report(NamedTuple):
    """Of a step, by depth: float32[K] each."""

    loss: Array
    accuracy: Array  # how often the likeliest draft is the text's next token, given right ones before
    reached: Array  # how often all of a round are, up to here
    tokens: Array  # float32[]: rounds that count


def objective(
    recipe: Recipe,
    head: Head,
    params: PyTree,
    target: Target,
    lesson: Lesson,
    reading: Reading,
    places: Array,
    ids: Array | None = None,
    chunk: int | None = None,
) -> tuple[Array, Report]:
    """(float32[], what to report). Args: as `rounds`."""
    for name, part, has in (
        ("features", recipe.features, head.feature is not None),
        ("confidence", recipe.confidence, getattr(head.config, "confidence", "no") != "no"),
    ):
        if part and not has:
            raise UsageError(
                f"a head of {head.kind} says no {name}, and the recipe gives it a share of {part}; make it 0"
            )
    depths = min(recipe.depths, head.deepest or recipe.depths)

    def judge(said: list[Depth]) -> Sums:
        teacher = [_teacher(target, depth, ids) if recipe.reads_teacher else None for depth in said]
        size = said[0].logits.shape[-1]
        there = jnp.stack([depth.weight for depth in said])
        drafted = jnp.stack([depth.label < size for depth in said])
        weight = there * drafted
        loss_of = losses.combined(recipe.losses)
        parts = zip(said, teacher, weight, strict=True)
        loss = jnp.stack([loss_of(depth.logits, p, depth.label, w) for depth, p, w in parts])
        share = weight
        if recipe.weighting == "d_pace":
            label = [losses.cross_entropy(depth.logits, None, depth.label, depth.weight) for depth in said]
            # What the head cannot draft is never right, and behind a text's end nothing makes a draft longer.
            share = weight * losses.d_pace(jnp.where(drafted, -jnp.stack(label), -jnp.inf), there)
        hits = jnp.stack([jnp.argmax(depth.logits, -1) == depth.label for depth in said])
        reached = jnp.cumprod(hits & (there > 0), 0)
        sums = lambda x: jnp.sum(x * there, 1)
        nothing = jnp.zeros(len(said), jnp.float32)
        features = (
            sums(jnp.stack([_features(head, depth, k) for k, depth in enumerate(said)])) if recipe.features else nothing
        )
        confidence = sums(_confidence(said, teacher, hits, drafted)) if recipe.confidence else nothing
        return Sums(jnp.sum(share * loss, 1), jnp.sum(there, 1), sums(hits), sums(reached), features, confidence)

    total = rounds(head, params, target, lesson, reading, places, depths, ids, judge, chunk)
    count = jnp.maximum(total.weight, 1.0)
    share = jnp.ones(depths) if recipe.weighting == "d_pace" else losses.depth_decay(depths, recipe.decay)
    each = total.loss + recipe.features * total.features + recipe.confidence * total.confidence
    report = Report(total.loss / count, total.hits / count, total.reached / count, total.weight[0])
    return jnp.sum(share * each / count), jax.lax.stop_gradient(report)


def _teacher(target: Target, depth: Depth, ids: Array | None) -> Array:
    """float32[N, v]: what the target says of the tokens that the head drafts."""
    said = lambda target: unembed(depth.hidden, Context(depth.label[:, None], depth.label, target=target))
    if ids is None:
        return jax.lax.stop_gradient(said(target))
    size = depth.logits.shape[-1]
    drafted = jnp.zeros((size + 1,), jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))[:size]
    some = _with_outputs(target, drafted)
    return jax.lax.stop_gradient(said(target)[:, drafted] if some is None else said(some))


def _with_outputs(target: Target, ids: Array) -> Target | None:
    """The target that says these tokens alone; None where its output is not one table of its parameters.

    Of 49,152 tokens a head drafts 4,096: the logits of the others would be nine tenths of a step's arithmetic.
    """
    params: Any = target.params
    name = next((name for name in ("head", "embed") if isinstance(params, dict) and name in params), None)
    if name is None or set(params[name]) != {"weight"} or target.model.mesh is not None:
        return None
    return dataclasses.replace(target, params=params | {name: {"weight": params[name]["weight"][ids]}})


def _features(head: Head, depth: Depth, k: int) -> Array:
    """float32[N]: how far what the head said in place of the feature at depth k is from it."""
    assert head.feature is not None
    return losses.smooth_l1(head.feature(depth.scratch, k), depth.hidden)


def _confidence(said: list[Depth], teacher: list[Array | None], hits: Array, drafted: Array) -> Array:
    """float32[K, N]. drafted: bool[K, N], whether the head can draft what the text has: the teacher's distribution is
    of such tokens alone, and of others nothing is accepted."""

    def accepted(depth: Depth, p: Array | None, hit: Array, can: Array) -> Array:
        if p is None:
            return hit.astype(jnp.float32)
        variation = losses.total_variation(depth.logits, p, depth.label, depth.weight)
        return jax.lax.stop_gradient(can * (1 - variation))

    parts = [
        losses.binary_cross_entropy(jnp.ravel(depth.confidence), accepted(depth, p, hit, can))
        for depth, p, hit, can in zip(said, teacher, hits, drafted, strict=True)
        if depth.confidence is not None
    ]
    return jnp.stack(parts)


def leading_hits(
    head: Head, params: PyTree, target: Target, lesson: Lesson, reading: Reading, places: Array, depths: int,
    ids: Array | None,
) -> Array:  # fmt: skip
    """int32[B, R]: how many tokens of a greedy draft from each place are those of the text. Args: as `rounds`."""

    def judge(said: list[Depth]) -> Array:
        right = [(jnp.argmax(depth.logits, -1) == depth.label) & (depth.weight > 0) for depth in said]
        return jnp.sum(jnp.cumprod(jnp.stack(right).astype(jnp.int32), 0), 0).reshape(places.shape)

    return rounds(head, params, target, lesson, reading, places, depths, ids, judge)
