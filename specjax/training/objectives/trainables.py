"""What a training loop needs of what it trains, be it a head, a draft model or a denoiser."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead, Head
from specjax.training.data.packing import Lesson
from specjax.training.data.vocabulary import own_ids
from specjax.training.objectives import draft_models, masked, stopping
from specjax.training.objectives.head_objective import Report, leading_hits, objective
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.unroll import Reading, read
from specjax.types import Array, Model, PyTree, Target

FULL = 512  # tokens of a text for which the noise on features is what the recipe says

Pupil = DraftHead | Target | stopping.Stopping | Denoiser
"""What is trained, with its parameters."""


class Learner(NamedTuple):
    """Something that drafts, as pure functions of its parameters. Hashable: of equal ones it is the same object."""

    kind: str  # whose recipe is the default
    config: Any
    deepest: int | None  # drafts that it can have behind one another; None: any number
    # (recipe, params, target, lesson, places int32[B, R], key, chunk) -> (float32[], Report)
    loss: Callable[..., tuple[Array, Report]]
    # (params, target, lesson, depths) -> int32[B, T - 1]: how many tokens of a greedy draft of each place are right
    leading: Callable[..., Array]
    # streams of the target that, with its last states, are all that the loss needs of a pass of it: it takes them as
    # `reading=` where they are known; None: it needs more
    taps: tuple[int, ...] | None = None
    whole_rounds: bool = False  # whether the loss is of a round of drafts from each place, or of the first alone


def learner_of(pupil: Pupil) -> Learner:
    """What trains it."""
    if isinstance(pupil, Denoiser):
        return of_denoiser(pupil.replace(params=()))
    if isinstance(pupil, stopping.Stopping):
        return of_stopping(pupil.model, pupil.rejections, pupil.kept)
    return of_head(pupil.head) if isinstance(pupil, DraftHead) else of_model(pupil.model)


@functools.cache
def of_head(head: Head) -> Learner:
    """A head on the target's own features, in rounds."""

    def loss(
        recipe: Recipe, params: PyTree, target: Target, lesson: Lesson, places: Array, key: Array, chunk: int | None,
        reading: Reading | None = None,
    ) -> tuple[Array, Report]:  # fmt: skip
        reading = read(target, head, lesson) if reading is None else reading
        if recipe.noise:
            size = recipe.noise * FULL / lesson.tokens.shape[1]
            noise = jax.random.uniform(key, reading.features.shape, jnp.float32, -size, size)
            reading = reading._replace(features=reading.features + noise.astype(reading.features.dtype))
        params, ids = own_ids(params)
        return objective(recipe, head.learns_as or head, params, target, lesson, reading, places, ids, chunk)

    def leading(params: PyTree, target: Target, lesson: Lesson, depths: int) -> Array:
        batch, size = lesson.tokens.shape
        places = jnp.broadcast_to(jnp.arange(size - 1, dtype=jnp.int32), (batch, size - 1))
        params, ids = own_ids(params)
        return leading_hits(head, params, target, lesson, read(target, head, lesson), places, depths, ids)

    taps = None if head.reads_cache else head.taps
    return Learner(head.kind, head.config, head.deepest, loss, leading, taps, whole_rounds=True)


@functools.cache
def of_model(model: Model) -> Learner:
    """A draft model on texts."""

    def loss(
        recipe: Recipe, params: PyTree, target: Target | None, lesson: Lesson, places: Array, key: Array,
        chunk: int | None, reading: Reading | None = None,
    ) -> tuple[Array, Report]:  # fmt: skip
        hidden = None if reading is None else reading.hidden
        return draft_models.loss_of(recipe, model, params, target, lesson, places, chunk, hidden)

    leading = functools.partial(draft_models.leading_hits, model)
    return Learner("distillspec", model.config, None, loss, leading, taps=())


@functools.cache
def of_stopping(model: Model, rejections: float, kept: float) -> Learner:
    """A head that says when its draft model is to stop."""

    def loss(
        recipe: Recipe, params: PyTree, target: Target, lesson: Lesson, places: Array, key: Array, chunk: int | None
    ) -> tuple[Array, Report]:
        found = stopping.examples(model, params["draft"], target, lesson, key, kept)
        return stopping.loss_of(params["head"], found, rejections)

    def leading(params: PyTree, target: Target, lesson: Lesson, depths: int) -> Array:
        raise UsageError("a head that says when to stop drafts nothing to be measured; hold no texts out")

    return Learner("specdec++", (model.config, rejections, kept), None, loss, leading)


@functools.cache
def of_denoiser(denoiser: Denoiser) -> Learner:
    """A diffusion language model on texts; block-causal ones with complementary masks. denoiser: without parameters."""

    def loss(
        recipe: Recipe, params: PyTree, target: Target | None, lesson: Lesson, places: Array, key: Array,
        chunk: int | None,
    ) -> tuple[Array, Report]:  # fmt: skip
        if recipe.reads_teacher:
            raise UsageError("a denoiser learns from texts alone; give the losses (('ce', 1.0),)")
        pupil = denoiser.replace(params=params)
        view = masked.noised(pupil, lesson, key)
        views = (view, masked.complement(lesson, view)) if pupil.is_causal else (view,)
        value, said = masked.loss_of(pupil, lesson, views, chunk=chunk)
        right = (said.hits / jnp.maximum(said.masked, 1))[None]
        return value, Report(value[None], right, right, said.masked)

    def leading(params: PyTree, target: Target, lesson: Lesson, depths: int) -> Array:
        raise UsageError("a denoiser drafts nothing to be measured; hold no texts out")

    about = (denoiser.model.config, denoiser.attention, denoiser.block, denoiser.alignment, denoiser.mask_token)
    return Learner("masked_diffusion", about, None, loss, leading)
