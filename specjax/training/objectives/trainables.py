"""Training objectives of draft heads, draft models, stopping heads and denoisers, behind one interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead, Head
from specjax.training.data.packing import PackedBatch
from specjax.training.data.vocabulary import use_draft_ids
from specjax.training.objectives import draft_models, masked, stopping
from specjax.training.objectives.head_objective import StepReport, compute_head_loss, count_leading_hits, head_depths
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.unroll import Rounds, TargetActivations, run_target
from specjax.types import Array, Model, PyTree, Target

NOISE_LENGTH = 512  # length of a row at which the noise on features has the size in the recipe

Trainable = DraftHead | Target | stopping.StoppingTrainable | Denoiser
"""Everything that `train` accepts. Each has `params`."""


class TrainingObjective(NamedTuple):
    """Pure functions of the parameters of a trainable. Hashable; equal trainables share one object."""

    kind: str  # selects the default recipe
    config: Any  # identifies the trainable, apart from its parameters
    max_depth: int | None  # longest chain that can be drafted; None: any length
    # (recipe, params, target, packed, positions int32[B, R], key, chunk) -> (float32[], StepReport)
    loss: Callable[..., tuple[Array, StepReport]]
    # (params, target, packed, depths) -> int32[B, T - 1], correct leading tokens of a greedy draft from each position
    leading_hits: Callable[..., Array]
    # Layers of the target. The loss reads only their activations and the last hidden states, and accepts both as
    # `activations=`. None: the loss reads more of the target.
    taps: tuple[int, ...] | None = None
    whole_rounds: bool = False  # True: the loss covers all depths of a round; False: only its first token
    # recipe -> drafted tokens per round. Raises a UsageError for more than can be drafted.
    depths: Callable[[Recipe], int] = lambda recipe: recipe.depths or recipe.passes


def build_objective(trainable: Trainable) -> TrainingObjective:
    """Return the training objective of a head, draft model, stopping head or denoiser."""
    if isinstance(trainable, Denoiser):
        return build_denoiser_objective(trainable.replace(params=()))
    if isinstance(trainable, stopping.StoppingTrainable):
        return build_stopping_objective(trainable.model, trainable.rejection_weight, trainable.text_share)
    if isinstance(trainable, DraftHead):
        return build_head_objective(trainable.head)
    return build_model_objective(trainable.model)


@functools.cache
def build_head_objective(head: Head) -> TrainingObjective:
    """Return the objective of a head that reads the target's features and drafts rounds."""

    def loss(
        recipe: Recipe, params: PyTree, target: Target, packed: PackedBatch, positions: Array, key: Array,
        chunk: int | None, activations: TargetActivations | None = None,
    ) -> tuple[Array, StepReport]:  # fmt: skip
        activations = run_target(target, head, packed) if activations is None else activations
        if recipe.noise:
            size = recipe.noise * NOISE_LENGTH / packed.tokens.shape[1]
            noise = jax.random.uniform(key, activations.features.shape, jnp.float32, -size, size)
            activations = activations._replace(features=activations.features + noise.astype(activations.features.dtype))
        params, ids = use_draft_ids(params)
        rounds = Rounds(packed, activations, positions, ids)
        return compute_head_loss(recipe, head.training_head or head, params, target, rounds, chunk)

    def leading_hits(params: PyTree, target: Target, packed: PackedBatch, depths: int) -> Array:
        batch, size = packed.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(size - 1, dtype=jnp.int32), (batch, size - 1))
        params, ids = use_draft_ids(params)
        rounds = Rounds(packed, run_target(target, head, packed), positions, ids)
        return count_leading_hits(head, params, target, rounds, depths)

    taps = None if head.reads_cache else head.taps
    return TrainingObjective(
        head.kind, head.config, head.max_depth, loss, leading_hits, taps, whole_rounds=True,
        depths=lambda recipe: head_depths(recipe, head),
    )  # fmt: skip


@functools.cache
def build_model_objective(model: Model) -> TrainingObjective:
    """Return the objective of a draft model."""

    def loss(
        recipe: Recipe, params: PyTree, target: Target | None, packed: PackedBatch, positions: Array, key: Array,
        chunk: int | None, activations: TargetActivations | None = None,
    ) -> tuple[Array, StepReport]:  # fmt: skip
        hidden = None if activations is None else activations.hidden
        return draft_models.compute_loss(recipe, model, params, target, packed, positions, chunk, hidden)

    leading_hits = functools.partial(draft_models.count_leading_hits, model)
    return TrainingObjective("distillspec", model.config, None, loss, leading_hits, taps=())


@functools.cache
def build_stopping_objective(model: Model, rejection_weight: float, text_share: float) -> TrainingObjective:
    """Return the objective of a head that decides when its draft model stops drafting."""

    def loss(
        recipe: Recipe, params: PyTree, target: Target, packed: PackedBatch, positions: Array, key: Array,
        chunk: int | None,
    ) -> tuple[Array, StepReport]:  # fmt: skip
        examples = stopping.make_examples(model, params["draft"], target, packed, key, text_share)
        return stopping.compute_loss(params["head"], examples, rejection_weight)

    def leading_hits(params: PyTree, target: Target, packed: PackedBatch, depths: int) -> Array:
        raise UsageError("a stopping head drafts no tokens, so none can be measured; leave held_out empty")

    config = (model.config, rejection_weight, text_share)
    return TrainingObjective("specdec++", config, None, loss, leading_hits)


@functools.cache
def build_denoiser_objective(denoiser: Denoiser) -> TrainingObjective:
    """Return the objective of a denoiser.

    Block-causal models are trained with complementary masks.

    Args: denoiser: without parameters, so that equal denoisers share one objective.
    """

    def loss(
        recipe: Recipe, params: PyTree, target: Target | None, packed: PackedBatch, positions: Array, key: Array,
        chunk: int | None,
    ) -> tuple[Array, StepReport]:  # fmt: skip
        if recipe.reads_teacher:
            raise UsageError("a denoiser is trained on texts alone; give the losses (('ce', 1.0),)")
        model = denoiser.replace(params=params)
        view = masked.mask_randomly(model, packed, key)
        views = (view, masked.complement(packed, view)) if model.is_causal else (view,)
        value, sums = masked.compute_loss(model, packed, views, chunk=chunk)
        accuracy = (sums.hits / jnp.maximum(sums.masked, 1))[None]
        return value, StepReport(value[None], accuracy, accuracy, sums.masked)

    def leading_hits(params: PyTree, target: Target, packed: PackedBatch, depths: int) -> Array:
        raise UsageError("a denoiser drafts no tokens, so none can be measured; leave held_out empty")

    config = (denoiser.model.config, denoiser.attention, denoiser.block, denoiser.alignment, denoiser.mask_token)
    return TrainingObjective("masked_diffusion", config, None, loss, leading_hits)
