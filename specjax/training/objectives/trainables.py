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
from specjax.models.heads.kinds import KINDS, TRAINABLE
from specjax.training.data.packing import PackedBatch
from specjax.training.data.vocabulary import use_draft_ids
from specjax.training.objectives import draft_models, masked, stopping
from specjax.training.objectives.anchors import draw_depths, draw_positions
from specjax.training.objectives.chunks import MeanSums, map_in_chunks, sum_in_batches, sum_in_two_passes
from specjax.training.objectives.head_objective import (
    StepReport,
    chain_acceptance,
    compute_head_loss,
    head_depths,
    sum_head_losses,
)
from specjax.training.objectives.losses import has_statistics
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.unroll import Rounds, TargetActivations, run_target, unroll_rounds
from specjax.types import Array, Model, PyTree, Target

NOISE_LENGTH = 512  # length of a text at which the noise on features has the size in the recipe
COMPRESSOR = 2  # folded into the keys of what a head draws from images
ROUNDS_TOGETHER = 128  # rounds of a row whose logits are computed together in a measurement

Trainable = DraftHead | Target | stopping.StoppingTrainable | Denoiser
"""Everything that `train` accepts. Each has `params`."""


class StepBatch(NamedTuple):
    """The inputs of a step, or of a part of its rows."""

    packed: PackedBatch
    positions: Array  # int32[B, R], where rounds begin; -1: no round
    keys: Array  # [B], random keys of noise, sampled masks and drafts
    activations: TargetActivations | None = None  # cached activations of the target; None: the target runs


class TrainingObjective(NamedTuple):
    """Pure functions of the parameters of a trainable. Hashable; equal trainables share one object."""

    kind: str  # selects the default recipe
    config: Any  # identifies the trainable, apart from its parameters
    max_depth: int | None  # longest chain that can be drafted; None: any length
    # (recipe, params, target, batch, chunk, means) -> sums over a part of the step's rows
    sums: Callable[..., Any]
    loss: Callable[[Recipe, Any], tuple[Array, StepReport]]  # (recipe, sums of the whole step)
    # (params, target, packed, depths, temperature) -> float32[B, T - 1, K], see `head_objective.chain_acceptance`
    acceptance: Callable[..., Array]
    # Layers of the target. The loss reads only their activations and the last hidden states, and accepts both in the
    # batch. None: the loss reads more of the target.
    taps: tuple[int, ...] | None = None
    whole_rounds: bool = False  # True: the loss covers all depths of a round; False: only its first token
    # recipe -> drafted tokens per round. Raises a UsageError for more than can be drafted.
    depths: Callable[[Recipe], int] = lambda recipe: recipe.depths or recipe.passes


def compute_loss(
    objective: TrainingObjective, recipe: Recipe, params: PyTree, target: Target | None, batch: StepBatch,
    chunk: int | None = None, parts: int = 1,
) -> tuple[Array, StepReport]:  # fmt: skip
    """Return (float32[], statistics) of a step. They do not depend on `chunk` and `parts`.

    Args:
      chunk: positions of a row whose logits are computed together; None: all.
      parts: parts of the rows that are computed one after another, and whose gradients are added.
    """

    def run(params: PyTree, means: Array | None) -> MeanSums:
        of_part = lambda params, part: objective.sums(recipe, params, target, part, chunk, means)
        return sum_in_batches(of_part, parts, params, batch)

    is_split = parts > 1 or chunk is not None
    return objective.loss(recipe, sum_in_two_passes(run, params, is_split and has_statistics(recipe.losses)))


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
    """Return the objective of a head that reads the target's features and drafts rounds.

    Raises: UsageError for a head of a kind that specjax does not train.
    """
    if head.kind in KINDS and head.kind not in TRAINABLE:
        raise UsageError(f"specjax does not train heads of {head.kind}; choose one of {', '.join(TRAINABLE)}")

    def sums(
        recipe: Recipe, params: PyTree, target: Target, batch: StepBatch, chunk: int | None, means: Array | None
    ) -> Any:
        packed, activations = batch.packed, batch.activations
        if recipe.anchors and packed.inputs is not None:
            raise UsageError(
                f"the recipe of {head.kind} shifts positions (anchors=True), by which images are found; set it to "
                "False, or train on texts"
            )
        token_positions = draw_positions(packed, batch.keys, target.model.max_positions) if recipe.anchors else None
        activations = run_target(target, head, packed, token_positions) if activations is None else activations
        if recipe.noise:
            activations = _add_noise(activations, packed, recipe.noise, batch.keys)
        params, ids = use_draft_ids(params)
        # The noise on features draws from the keys themselves.
        keys = jax.vmap(lambda key: jax.random.fold_in(key, COMPRESSOR))(batch.keys) if head.reads_images else None
        rounds = Rounds(packed, activations, batch.positions, ids, token_positions, keys=keys)
        if recipe.draws_depth:
            rounds = rounds._replace(skipped=draw_depths(batch.positions, batch.keys, head_depths(recipe, head)))
        return sum_head_losses(recipe, head.training_head or head, params, target, rounds, chunk, means)

    def acceptance(params: PyTree, target: Target, packed: PackedBatch, depths: int, temperature: float) -> Array:
        params, rounds, chunk = _every_round(head, params, target, packed)
        scores = chain_acceptance(head, params, target, rounds, depths, temperature, chunk)
        return scores[:, : packed.tokens.shape[1] - 1]

    taps = None if head.reads_cache or head.reads_images else head.taps
    return TrainingObjective(
        head.kind, head.config, head.max_depth, sums, compute_head_loss, acceptance, taps, whole_rounds=True,
        depths=lambda recipe: head_depths(recipe, head),
    )  # fmt: skip


def _every_round(head: Head, params: PyTree, target: Target, packed: PackedBatch) -> tuple[PyTree, Rounds, int]:
    """Return the parameters, the rounds from every position, and the number of rounds that are computed together."""
    batch, size = packed.tokens.shape
    count = size - 1 if size <= ROUNDS_TOGETHER else -(-(size - 1) // ROUNDS_TOGETHER) * ROUNDS_TOGETHER
    column = jnp.arange(count, dtype=jnp.int32)
    positions = jnp.broadcast_to(jnp.where(column < size - 1, column, -1), (batch, count))
    params, ids = use_draft_ids(params)
    return params, Rounds(packed, run_target(target, head, packed), positions, ids), min(count, ROUNDS_TOGETHER)


def chain_confidence(head: DraftHead, target: Target, packed: PackedBatch, depths: int) -> Array:
    """Return float32[B, T - 1, K], the confidence of a head in each draft of the rounds from every position."""
    params, rounds, chunk = _every_round(head.head, head.params, target, packed)
    judge = lambda outputs: jnp.stack([depth.confidence for depth in outputs], 1).reshape(
        len(rounds.positions), -1, depths
    )
    confidence = unroll_rounds(head.head, params, target, rounds, depths, judge, chunk, over=map_in_chunks)
    return confidence[:, : packed.tokens.shape[1] - 1]


def _add_noise(activations: TargetActivations, packed: PackedBatch, size: float, keys: Array) -> TargetActivations:
    """Add uniform noise to the features. Its half width is `size` for a text of NOISE_LENGTH tokens.

    Shorter texts get more noise. The noise of a row depends only on its own key.
    """
    features = activations.features
    half_width = size * NOISE_LENGTH / text_lengths(packed)[:, :, None]
    unit = jax.vmap(lambda key: jax.random.uniform(key, features.shape[1:], jnp.float32, -1, 1))(keys)
    return activations._replace(features=features + (half_width * unit).astype(features.dtype))


def text_lengths(packed: PackedBatch) -> Array:
    """Return int32[B, T], the length of the text that each token belongs to."""
    text_start = jnp.asarray(packed.text_start)
    batch, size = text_start.shape
    counts = jnp.zeros((batch, size + 1), jnp.int32).at[jnp.arange(batch)[:, None], text_start].add(1)
    return jnp.take_along_axis(counts, text_start, 1)


@functools.cache
def build_model_objective(model: Model) -> TrainingObjective:
    """Return the objective of a draft model."""

    def sums(
        recipe: Recipe, params: PyTree, target: Target | None, batch: StepBatch, chunk: int | None, means: Array | None
    ) -> Any:
        hidden = None if batch.activations is None else batch.activations.hidden
        return draft_models.sum_losses(
            recipe, model, params, target, batch.packed, batch.positions, chunk, means, hidden
        )

    loss = lambda recipe, sums: draft_models.compute_loss(sums)
    acceptance = functools.partial(draft_models.chain_acceptance, model)
    return TrainingObjective("distillspec", model.config, None, sums, loss, acceptance, taps=())


@functools.cache
def build_stopping_objective(model: Model, rejection_weight: float, text_share: float) -> TrainingObjective:
    """Return the objective of a head that decides when its draft model stops drafting."""

    def sums(
        recipe: Recipe, params: PyTree, target: Target, batch: StepBatch, chunk: int | None, means: Array | None
    ) -> Any:
        examples = stopping.make_examples(model, params["draft"], target, batch.packed, batch.keys[0], text_share)
        return stopping.sum_losses(params["head"], examples, rejection_weight)

    config = (model.config, rejection_weight, text_share)
    loss = lambda recipe, sums: stopping.compute_loss(sums)
    return TrainingObjective("specdec++", config, None, sums, loss, _no_acceptance("a stopping head"))


@functools.cache
def build_denoiser_objective(denoiser: Denoiser) -> TrainingObjective:
    """Return the objective of a denoiser.

    Block-causal models are trained with complementary masks.

    Args: denoiser: without parameters, so that equal denoisers share one objective.
    """

    def sums(
        recipe: Recipe, params: PyTree, target: Target | None, batch: StepBatch, chunk: int | None, means: Array | None
    ) -> masked.MaskedSums:
        if recipe.reads_teacher:
            raise UsageError("a denoiser is trained on texts alone; give the losses (('ce', 1.0),)")
        model = denoiser.replace(params=params)
        view = masked.mask_randomly(model, batch.packed, batch.keys[0])
        views = (view, masked.complement(batch.packed, view)) if model.is_causal else (view,)
        return masked.sum_losses(model, batch.packed, views, chunk=chunk)

    def loss(recipe: Recipe, total: masked.MaskedSums) -> tuple[Array, StepReport]:
        accuracy = (total.hits / jnp.maximum(total.masked, 1))[None]
        value = total.loss / jnp.maximum(total.columns, 1)
        return value, StepReport(value[None], accuracy, accuracy, total.masked)

    config = (denoiser.model.config, denoiser.attention, denoiser.block, denoiser.alignment, denoiser.mask_token)
    return TrainingObjective("masked_diffusion", config, None, sums, loss, _no_acceptance("a denoiser"))


def _no_acceptance(owner: str) -> Callable[..., Array]:
    """Return the `acceptance` of a trainable that drafts nothing."""

    def acceptance(*arguments: Any) -> Array:
        raise UsageError(f"{owner} drafts no tokens, so none can be measured; leave held_out empty")

    return acceptance
