"""The training loop of heads and models, with evaluation, early stopping and resumption."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specjax.arrays.modes import with_standard_modes
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.variants.expanding import check_trainable
from specjax.numerics.validation import check_integer, check_range
from specjax.parallel import gather, place, shard_head
from specjax.persistence.fingerprint import describe, digest, digest_arrays, digest_model, digest_weights
from specjax.training.data.packing import PackedBatch, TrainingText, choose_round_starts, find_round_starts, pack
from specjax.training.loop.checkpoints import TrainingCheckpoints
from specjax.training.loop.optimizers import check_frozen, split_params
from specjax.training.loop.schedule import ScheduledBatch, ScheduleOptions, TrainingSchedule, make_schedule
from specjax.training.loop.step import (
    State,
    TrainingOutcome,
    TrainingPlan,
    export_trainable,
    init_state,
    main_dtype,
    train_step,
)
from specjax.training.loop.target_activations import ActivationCache, CachedActivations
from specjax.training.measure.acceptance_eval import MeasuredAcceptance, measure_acceptance, place_batch
from specjax.training.objectives.recipes import RECIPES, Recipe, check_recipe, recipe_of
from specjax.training.objectives.trainables import Trainable, TrainingObjective, build_objective
from specjax.types import PyTree, Target

ReplaceBatch = Callable[[int, int, PackedBatch, Any], PackedBatch]


class LoopSettings(NamedTuple):
    """Numeric settings of a training loop, which `train` describes."""

    epochs: int = 1
    rows: int = 4
    length: int = 512
    accumulate: int = 1
    starts_per_row: int | None = None
    chunk: int | None = None
    num_tokens: int | None = None
    temperature: float = 0.0
    evaluate_every: int = 100
    patience: int | None = None
    seed: int = 0


class TrainingProgress(NamedTuple):
    """A report about a step."""

    step: int
    steps: int
    epoch: int
    tokens: int  # trained positions
    seconds: float  # training time
    loss: float | None  # None in the report before the first step
    accuracy: tuple[float, ...]  # accuracy of drafts by depth
    measured: MeasuredAcceptance | None = None  # on the held-out texts, if they were evaluated
    best: Any = None  # the trained head or model, if it has the most tokens per pass so far


@with_standard_modes
def train(
    target: Target | None,
    trainable: Trainable,
    texts: Sequence[TrainingText],
    *,
    recipe: Recipe | None = None,
    held_out: Sequence[TrainingText] = (),
    epochs: int = 1,
    rows: int = 4,
    length: int = 512,
    accumulate: int = 1,
    starts_per_row: int | None = None,
    chunk: int | None = None,
    num_tokens: int | None = None,
    temperature: float = 0.0,
    evaluate_every: int = 100,
    evaluate_first: bool = False,
    patience: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    activation_cache: ActivationCache | None = None,
    identity: Mapping[str, Any] = MappingProxyType({}),
    replace_batch: ReplaceBatch | None = None,
    on_progress: Callable[[TrainingProgress], Any] = lambda progress: None,
) -> Any:
    """Train a head or model on texts of the target, and return the evaluated version with the most tokens per pass.

    Args:
      target: None if no loss reads it and there are no held-out texts.
      trainable: a head (see `new_head`), a draft model (a `Target`), a stopping head or a `Denoiser`.
      recipe: None: the recipe of the trainable's kind.
      held_out: texts that the target wrote at `temperature`, on which tokens per pass are measured.
      rows, length: shape of a batch. The mesh axis "data" must divide the rows.
      accumulate: batches whose gradients are added in a step, which is then that of `accumulate` x `rows` rows.
      starts_per_row: limit of the rounds that a row is trained on; None: all positions.
      chunk: positions of a row whose logits are computed together, to trade arithmetic for memory; None: all.
      num_tokens: length of the measured chain; None: the depths that are trained.
      temperature: of the measured chain, which is sampled; 0: greedy.
      evaluate_first: evaluate before the first step too. A trainable that no step improves is then returned unchanged.
      patience: evaluations in a row without improvement before training stops; None: unlimited.
      folder: the run is stored here at every evaluation. An interrupted run resumes from there, bit for bit.
      activation_cache: cache of the target's activations, so that the target runs once instead of in every epoch.
      identity: additional values, such as the starting point, that a run in the folder must share to be resumed.
      replace_batch: (step, steps, packed, current trainable) -> the batch to train on, of the same shape. It must be a
        pure function, such as `draft_models.OnPolicy`.
      on_progress: receives a report after every step.

    Raises: UsageError for an invalid recipe, texts without responses, or a loss that is not finite. The last error
      names the step, and the folder holds the state of the last evaluation.
    """
    objective = build_objective(trainable)
    recipe = recipe or recipe_of(objective.kind)
    check_recipe(recipe)
    settings = LoopSettings(
        epochs, rows, length, accumulate, starts_per_row, chunk, num_tokens, temperature, evaluate_every, patience, seed
    )
    _check_settings(settings)
    _check_texts(target, texts, held_out, settings)
    uses_cache = activation_cache is not None
    identity = run_identity(target, objective, trainable.params, recipe, settings, uses_cache, identity)
    if uses_cache and replace_batch is not None:
        raise UsageError("cached activations need fixed texts; leave replace_batch or activation_cache out")
    mesh = None if target is None else target.model.mesh
    if isinstance(trainable, DraftHead) and mesh is not None:
        trainable = shard_head(trainable, mesh)
    placeholder = None if target is None else target.model.capabilities.placeholder
    rising = placeholder if recipe.rising_images else None
    schedule = _plan_batches(texts, recipe, settings, rising, resamples=replace_batch is not None)
    plan = TrainingPlan(recipe, objective, schedule.steps, chunk, accumulate, identity["dtype"])
    state, frozen = init_state(plan, trainable.params)
    if mesh is not None:
        state = _normalise_shardings(state, mesh)
    if folder is not None:  # without a folder there is no run to compare
        identity |= _data_identity(texts, held_out, settings, schedule, replace_batch, frozen)
    checkpoints = TrainingCheckpoints(folder, trainable, state, identity)
    activations = None
    if activation_cache is not None:
        activations = activation_cache.read(target, objective, texts, rows, length)
    loop = _TrainingLoop(
        target, trainable, plan, frozen, held_out, settings, identity["num_tokens"], checkpoints, activations,
        replace_batch, on_progress,
    )  # fmt: skip
    state = loop.run(schedule, evaluate_first)
    return checkpoints.best or export_trainable(trainable, state, frozen)


def run_identity(
    target: Target | None, objective: TrainingObjective, params: PyTree, recipe: Recipe, settings: LoopSettings,
    uses_cache: bool, extra: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the values, except those of texts, that a run must share with the run in a folder to resume it.

    Args: params: parameters of the trainable, or their shapes.

    Raises: UsageError for a recipe that trains no parameters, depths or a chain beyond what the trainable drafts, or
      quantised parameters.
    """
    check_trainable(params, f"the {objective.kind} to train")
    default = RECIPES.get(objective.kind)  # its frozen names do not exist in all heads of the kind
    check_frozen(params, [name for name in recipe.frozen if default is None or name not in default.frozen])
    trained, _ = split_params(params, recipe.frozen)
    if not jax.tree.leaves(trained):
        raise UsageError(f"all parameters are frozen ({', '.join(recipe.frozen)}); freeze fewer")
    depths = objective.depths(recipe)
    num_tokens, limit = settings.num_tokens, objective.max_depth
    if num_tokens is not None and limit and num_tokens > limit:
        raise UsageError(f"num_tokens={num_tokens} is more than the {limit} that {objective.kind} drafts; lower it")
    return {
        "recipe": repr(recipe), "config": repr(objective.config), "seed": settings.seed, "epochs": settings.epochs,
        "chunk": settings.chunk, "accumulate": settings.accumulate, "temperature": settings.temperature,
        "target": None if target is None else digest_model(target), "activations": uses_cache,
        "dtype": main_dtype(trained), "num_tokens": num_tokens or depths, "depths": depths, **extra,
    }  # fmt: skip


def _data_identity(
    texts: Sequence[TrainingText], held_out: Sequence[TrainingText], settings: LoopSettings,
    schedule: TrainingSchedule, replace_batch: ReplaceBatch | None, frozen: PyTree,
) -> dict[str, Any]:  # fmt: skip
    """Return the values of texts and frozen parameters that a run must share to resume another."""
    return {
        "texts": _digest_texts(texts), "held_out": _digest_texts(held_out),
        "shape": [settings.rows, settings.length, schedule.starts_per_row],
        "replace_batch": replace_batch and digest(describe(replace_batch)),
        "frozen parameters": _digest_frozen(frozen),
    }  # fmt: skip


def _digest_texts(texts: Sequence[TrainingText]) -> str:
    """Return a digest of texts, which depends on their order."""
    return digest(
        [(int(text.prompt_length), text.asides, *map(int, text.tokens), *_digest_inputs(text)) for text in texts]
    )


def _digest_inputs(text: TrainingText) -> list[str]:
    """Return a digest of the inputs of a text, in a list; [] if it has none."""
    return [] if text.inputs is None else [digest_arrays(text.inputs)]


def _digest_frozen(frozen: PyTree) -> str:
    """Return a digest of some values of frozen weights and all values of a draft vocabulary."""
    integers = [x for x in jax.tree.leaves(frozen) if jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 1]
    return digest((digest_weights(frozen), [np.asarray(gather(x)).tolist() for x in integers]))


def _plan_batches(
    texts: Sequence[TrainingText], recipe: Recipe, settings: LoopSettings, rising: int | None, resamples: bool
) -> TrainingSchedule:
    options = ScheduleOptions(
        settings.epochs, settings.accumulate * settings.rows, settings.length, settings.seed, settings.starts_per_row,
        packs=recipe.packs and not resamples, multiple=settings.chunk or 1, rising=rising, resamples=resamples,
    )  # fmt: skip
    return make_schedule(texts, options)


def _normalise_shardings(state: State, mesh: Mesh) -> State:
    """Place the whole state on the mesh, with specs without trailing None. Otherwise the second step compiles again.

    It still compiles again if XLA splits an array that the head replicates, such as attention that the mesh does not
    divide.
    """

    def normalise(x: jax.Array) -> jax.Array:
        spec = list(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else []
        while spec and spec[-1] is None:
            spec.pop()
        return place(x, mesh, *spec)

    return jax.tree.map(normalise, state)


def _check_settings(settings: LoopSettings) -> None:
    """Raise a UsageError for numbers out of range."""
    for name, count in settings._asdict().items():
        if name not in ("seed", "patience", "temperature"):
            check_integer(name, count)
    for name, count in (("seed", settings.seed), ("patience", settings.patience)):
        check_integer(name, count, minimum=0)
    check_range("temperature", settings.temperature, lambda t: (t >= 0) & np.isfinite(t), "a number of at least 0")


def _check_texts(
    target: Target | None, texts: Sequence[TrainingText], held_out: Sequence[TrainingText], settings: LoopSettings
) -> None:
    """Raise a UsageError for texts and rows that do not fit the target.

    These are invalid tokens, held-out texts that cannot be measured, and rows that the mesh splits unevenly.
    """
    if target is None:
        if held_out:
            raise UsageError("held-out texts are measured with the target; give a target, or leave held_out empty")
        return
    count = target.model.vocab_size
    for text in (*texts, *held_out):
        if len(text.tokens) and not 0 <= min(text.tokens) <= max(text.tokens) < count:
            raise UsageError(f"the texts have token ids that the target lacks; its ids are from 0 to {count - 1}")
    rows, length, mesh = settings.rows, settings.length, target.model.mesh
    if held_out and not any(find_round_starts(packed).any() for packed in pack(held_out, rows, length)):
        raise UsageError(
            f"no held-out text has a response of two tokens in its first {length}; hold out others, or give longer rows"
        )
    if mesh is not None and rows % mesh.shape.get("data", 1):
        raise UsageError(
            f'rows={rows} cannot be split over the {mesh.shape["data"]} devices of "data"; give a multiple'
        )


@dataclass
class _TrainingLoop:
    """The loop of `train`, after its arguments are checked and its data are loaded."""

    target: Target | None
    trainable: Trainable
    plan: TrainingPlan
    frozen: PyTree
    held_out: Sequence[TrainingText]
    settings: LoopSettings
    depths: int  # length of the measured chain
    checkpoints: TrainingCheckpoints
    activations: CachedActivations | None
    replace_batch: ReplaceBatch | None
    on_progress: Callable[[TrainingProgress], Any]

    def run(self, schedule: TrainingSchedule, evaluate_first: bool) -> State:
        """Run all steps after the last checkpoint, and return the last state."""
        state, settings = self.checkpoints.state, self.settings
        done = int(state.step)
        if evaluate_first and not done:
            measured, best = self.evaluate(0, state)
            self.on_progress(TrainingProgress(0, schedule.steps, 0, 0, 0.0, None, (), measured, best))
        started = time.perf_counter() - self.checkpoints.position.seconds
        tokens = self.checkpoints.position.tokens
        for step, batch in enumerate(schedule.iterate_from(done, settings.seed), done + 1):
            if settings.patience is not None and self.checkpoints.position.since_best > settings.patience:
                break
            state, outcome = self.take_step(step, batch, state, schedule)
            tokens += int(outcome.report.tokens)
            seconds = time.perf_counter() - started
            measured, best, evaluates = None, None, step == schedule.steps or step % settings.evaluate_every == 0
            if evaluates:
                measured, best = self.evaluate(step, state)
            accuracy, loss = tuple(np.asarray(outcome.report.accuracy).tolist()), float(outcome.loss)
            self.on_progress(
                TrainingProgress(step, schedule.steps, batch.epoch, tokens, seconds, loss, accuracy, measured, best)
            )
            if evaluates:  # after the report, because a resumed run only reports steps after its checkpoint
                self.checkpoints.save_state(state, tokens, seconds)
        return state

    def take_step(
        self, step: int, batch: ScheduledBatch, state: State, schedule: TrainingSchedule
    ) -> tuple[State, TrainingOutcome]:
        """Take step `step`, counted from 1. Raises: UsageError if the loss is not finite."""
        index, seed = step - 1, self.settings.seed
        packed, positions = batch.packed, batch.positions
        if self.replace_batch is not None:
            current = export_trainable(self.trainable, state, self.frozen)
            packed = self.replace_batch(index, schedule.steps, packed, current)
            positions = choose_round_starts(packed, schedule.starts_per_row, np.random.default_rng([seed, index]))
        key = jax.random.fold_in(jax.random.key(seed), index)
        activations = None if self.activations is None else self.activations.lookup(batch.token_numbers)
        packed, positions, activations = place_batch(self.target, (packed, positions, activations))
        state, outcome = train_step(self.plan, state, self.frozen, self.target, packed, positions, key, activations)
        if not bool(outcome.finite):
            raise UsageError(
                f"the loss was {float(outcome.loss)} at step {step}; earlier progress is stored. Lower the learning "
                "rate, or check the texts"
            )
        return state, outcome

    def evaluate(self, step: int, state: State) -> tuple[MeasuredAcceptance | None, Any]:
        """Measure the held-out texts.

        Returns: (the measurement, the trained head or model if it is the best so far), each of which may be None.
        """
        if not self.held_out or self.target is None:
            return None, None
        current = export_trainable(self.trainable, state, self.frozen)
        settings = self.settings
        measured = measure_acceptance(
            self.target, current, self.held_out, depths=self.depths, rows=settings.rows, length=settings.length,
            temperature=settings.temperature,
        )  # fmt: skip
        return measured, current if self.checkpoints.update_best(current, step, measured) else None
