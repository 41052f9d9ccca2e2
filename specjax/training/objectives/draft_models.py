"""Training a plain draft model: a smaller model of the target's tokenizer that drafts chains (`drafters.two_model`).

Zhou, Lyu, Rawat, Menon, Rostamizadeh, Kumar, Kagy, Agarwal: DistillSpec: Improving Speculative Decoding via Knowledge
Distillation (2023), arXiv 2310.08461. Of texts y after prompts x, from the data, the target, the draft model or a mix:

    minimise the mean over x, y and t of D(p(. | x, y_<t), q(. | x, y_<t)), D one of `losses.LOSSES`

Goel, Gagrani, Jeon, Park, Lee, Lott: Direct Alignment of Draft Model for Speculative Decoding with Chat-Fine-Tuned LLMs
(2024), arXiv 2403.00858: the same with D = TVD++ on the target's answers.
Zafrir, Margulis, Shteyman, Guskin, Boudoukh: FastDraft: How to Train Your Draft (ACL Findings 2025), arXiv 2411.11055:
cross entropy on raw text, then on text that the target wrote; neither asks the target for anything.

Guarantee: decoding is as exact as before, since p does not change. Nothing is derived from the sampling of a text or
from the target.
Deviations: the mean is over all tokens of a lesson, not first over each text's; p and q are taken at temperature 1, as
in DistillSpec, whatever is served; losses with statistics of the batch have those of the places judged at a time.
FastDraft begins with random parameters; `pruned` is a start of our own. Where the vocabularies differ in size, p and q
are of the ids that both have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import decode
from specjax.arrays.indexing import take_along
from specjax.drafters import autoregressive
from specjax.errors import UsageError
from specjax.models.vocabulary import beside
from specjax.numerics.global_arrays import gather
from specjax.training.data.packing import Lesson
from specjax.training.objectives import losses
from specjax.training.objectives.chunks import sum_in_chunks
from specjax.training.objectives.head_objective import Report
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.unroll import one_pass
from specjax.types import Array, Model, PyTree, Target

POSITIONS = 64  # of a text, of which greedy tokens are looked up at a time


class Sums(NamedTuple):
    """Over places: float32[] each."""

    loss: Array
    hits: Array  # at which the likeliest token was the text's


class Places(NamedTuple):
    """What a draft model says of the first token that each of N rounds drafts, and what is true."""

    hidden: Array  # [B, N, D], of the draft model, at the root
    taught: Array | None  # [B, N, E], of the target
    label: Array  # int32[B, N]
    weight: Array  # float32[B, N]


def loss_of(
    recipe: Recipe, model: Model, params: PyTree, target: Target | None, lesson: Lesson, places: Array,
    chunk: int | None = None, taught: Array | None = None,
) -> tuple[Array, Report]:  # fmt: skip
    """(float32[], what to report) of a draft model on a lesson.

    Args:
      target: None where the losses are "ce" alone, which needs none.
      places: int32[B, R], as for heads: from place t the root x_{t+1} drafts x_{t+2}. -1: nowhere.
      chunk: how many of the R at a time, a divisor of R: logits are float32[B, chunk, V].
      taught: [B, T, E], the target's last states of the lesson, where these are known; None: it is run.
    """
    if recipe.reads_teacher and target is None:
        raise UsageError("only the loss ce can do without a target; give one, or the losses (('ce', 1.0),)")
    if not recipe.reads_teacher or target is None:
        taught = None
    elif taught is None:
        taught = one_pass(target.model, target.params, lesson)[0].hidden
    found = _at(model, params, target, lesson, places, taught)
    judge = losses.combined(recipe.losses)

    def some(params: PyTree, found: Places, i: Array, size: int) -> Sums:
        hidden, taught, label, weight = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, i, size, 1).reshape(-1, *x.shape[2:]), found
        )
        said = shared_logits(model, params, hidden, target)
        teacher = None
        if taught is not None and target is not None:
            teacher = jax.lax.stop_gradient(shared_logits(target.model, target.params, taught, Target(model, params)))
        hits = jnp.argmax(said, -1) == label
        return Sums(jnp.sum(weight * judge(said, teacher, label, weight)), jnp.sum(weight * hits))

    total = sum_in_chunks(some, places.shape[1], chunk, params, found)
    tokens = jnp.sum(found.weight)
    loss, accuracy = (x / jnp.maximum(tokens, 1.0) for x in total)
    return loss, jax.lax.stop_gradient(Report(loss[None], accuracy[None], accuracy[None], tokens))


def _at(
    model: Model, params: PyTree, target: Target | None, lesson: Lesson, places: Array, taught: Array | None
) -> Places:
    tokens, first, counts = (jnp.asarray(x) for x in lesson)
    size = tokens.shape[1]
    known = size_of(model, target)
    begin = jnp.maximum(places, 0)
    along = lambda x, ahead: take_along(x, jnp.minimum(begin + ahead, size - 1).reshape(*begin.shape, *x.shape[2:]), 1)
    at_root = lambda hidden: take_along(hidden, jnp.minimum(begin + 1, size - 1)[:, :, None], 1)
    hidden = at_root(one_pass(beside(model, target), params, lesson)[0].hidden)
    taught = None if taught is None else jax.lax.stop_gradient(at_root(taught))
    label = along(tokens, 2)
    there = (places >= 0) & (begin + 2 < size) & along(counts, 2) & (along(first, 2) == along(first, 0))
    return Places(hidden, taught, label, (there & (label < known)).astype(jnp.float32))


def size_of(model: Model, other: Target | None) -> int:
    """How many ids both have."""
    return model.vocab_size if other is None else min(model.vocab_size, other.model.vocab_size)


def shared_logits(model: Model, params: PyTree, hidden: Array, other: Target | None) -> Array:
    """float32[..., v] of the ids that both have."""
    if model.unembed is None:
        raise UsageError(f"{model.name} has no unembed, which training asks for; give a model of specjax.models")
    return model.unembed(params, hidden)[..., : size_of(model, other)]


def leading_hits(model: Model, params: PyTree, target: Target, lesson: Lesson, depths: int) -> Array:
    """int32[B, T - 1]: how many tokens of a greedy chain of `depths` from each place are those of the text.

    Until its first error a draft's tokens are the text's, so that one pass over the text says it of all.
    """
    tokens, first, counts = (jnp.asarray(x) for x in lesson)
    hidden = one_pass(beside(model, target), params, lesson)[0].hidden
    greedy = lambda x: jnp.argmax(shared_logits(model, params, x, target), -1)
    said = jax.lax.map(greedy, hidden.swapaxes(0, 1), batch_size=POSITIONS).swapaxes(0, 1)  # x_{t+1} by position t
    # Of place t: whether the token behind its root is right.
    right = (said[:, 1:-1] == tokens[:, 2:]) & counts[:, 2:] & (first[:, 2:] == first[:, :-2])
    right = jnp.pad(right, ((0, 0), (0, 1)))
    place = jnp.arange(right.shape[1])
    wrong = jax.lax.cummin(jnp.where(right, right.shape[1], place), axis=1, reverse=True)
    return jnp.minimum(wrong - place, depths).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class OnPolicy:
    """DistillSpec's mix of data: what `train(.., data=)` asks of each step's lesson. One text to a row.

    A lesson is answered by the draft model itself, as it is by then, with probability `share` (1: on-policy alone).
    """

    eos: tuple[int, ...]
    share: float = 0.5
    warmup: float = 0.1  # share of the steps in which it is not: its first samples are of no use
    temperature: float = 1.0
    seed: int = 0

    def __call__(self, step: int, steps: int, lesson: Lesson, student: Target) -> Lesson:
        own = np.random.default_rng([self.seed, step]).random() < self.share
        if not own or step < self.warmup * steps:
            return lesson
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return answered_by(student, lesson, key, eos=self.eos, temperature=self.temperature)


def answered_by(student: Target, lesson: Lesson, key: Array, *, eos: Sequence[int], temperature: float = 1.0) -> Lesson:
    """The prompts of a lesson with answers that the draft model samples, up to the end of their rows, and no longer
    than the longest prompt leaves it places for.

    Rows that count nothing stay. Raises: UsageError for rows of several texts.
    """
    tokens, first, counts = np.asarray(lesson.tokens), np.asarray(lesson.first), np.asarray(lesson.counts)
    size = tokens.shape[1]
    if ((first > 0) & counts).any():
        raise UsageError("rows with several texts cannot be answered anew; pack one to a row (packs=False)")
    has = np.any(counts, axis=1)
    prompt = np.where(has, np.maximum(np.argmax(counts, 1), 1), 1).astype(np.int32)
    longest = int(min(size - prompt[has].min(initial=size - 1), student.model.max_positions - prompt.max()))
    result = gather(
        decode(
            student, autoregressive(), (tokens, prompt), key=key, max_new_tokens=longest, temperature=temperature,
            eos=list(eos),
        )
    )  # fmt: skip
    place = np.arange(size)
    behind = place - prompt[:, None]
    said = np.take_along_axis(np.asarray(result.tokens), np.clip(behind, 0, result.tokens.shape[1] - 1), 1)
    answer = (behind >= 0) & (behind < np.asarray(result.lengths)[:, None])
    end = np.minimum(prompt + np.asarray(result.lengths), size)[:, None]
    anew = np.where(answer, said, np.where(behind < 0, tokens, 0)), np.where(place < end, 0, end), answer
    tokens, first, counts = (
        np.where(has[:, None], new, old).astype(old.dtype)
        for new, old in zip(anew, (tokens, first, counts), strict=True)
    )
    return Lesson(*map(jnp.asarray, (tokens, first, counts)))
