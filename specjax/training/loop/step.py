"""A training step, as a pure function of its state."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.modes import jit
from specjax.models.variants.expanding import check_trainable
from specjax.training.data.packing import PackedBatch
from specjax.training.loop.optimizers import make_optimizer, merge_params, split_params
from specjax.training.objectives.head_objective import StepReport
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.trainables import StepBatch, Trainable, TrainingObjective, compute_loss
from specjax.training.objectives.unroll import TargetActivations
from specjax.types import Array, PyTree, Target


class TrainingPlan(NamedTuple):
    """The static part of a run, the same in all steps. Hashable."""

    recipe: Recipe
    objective: TrainingObjective
    steps: int
    chunk: int | None = None  # positions of a row whose logits are computed together; None: all
    parts: int = 1  # parts of the rows whose gradients are computed one after another
    dtype: str = "float32"  # of matrix products; the trained parameters are stored in float32


class State(NamedTuple):
    """The part of a run that a step changes."""

    trained: PyTree  # float32 parameters, None in place of frozen ones
    optimizer: PyTree
    step: Array  # int32[]


class TrainingOutcome(NamedTuple):
    """Results of a step."""

    loss: Array  # float32[]
    report: StepReport
    finite: Array  # bool[], False if the loss or gradient is not finite; such a step changes nothing


def init_state(plan: TrainingPlan, params: PyTree) -> tuple[State, PyTree]:
    """Return (initial state, frozen parameters). Raises: UsageError if a trained parameter is quantised."""
    trained, frozen = split_params(params, plan.recipe.frozen)
    check_trainable(trained, f"the {plan.objective.kind} to train")
    trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained)
    return State(trained, make_optimizer(plan.recipe, plan.steps).init(trained), jnp.int32(0)), frozen


def compute_step(
    plan: TrainingPlan, state: State, frozen: PyTree, target: Target | None, packed: PackedBatch, positions: Array,
    key: Array, activations: TargetActivations | None = None,
) -> tuple[State, TrainingOutcome]:  # fmt: skip
    """Take one optimizer step on a packed batch. Pure; the target and the frozen parameters get no gradient.

    The result does not depend on the plan's `chunk` and `parts`, up to rounding. Only denoisers and stopping heads draw
    their masks and drafts separately for each part.

    Args:
      frozen: from `init_state`. positions: int32[B, R], where rounds begin; -1: no round.
      key: random key of the noise on features, if the recipe has any, and of sampled masks and drafts.
      activations: cached activations of the target on this batch; None: the target runs.
    """
    import optax

    batch = StepBatch(packed, positions, jax.random.split(key, len(packed.tokens)), activations)

    def loss_of(trained: PyTree) -> tuple[Array, StepReport]:
        params = merge_params(jax.tree.map(lambda x: x.astype(plan.dtype), trained), frozen)
        return compute_loss(plan.objective, plan.recipe, params, target, batch, plan.chunk, plan.parts)

    (loss, report), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.trained)
    finite = jnp.isfinite(loss) & jnp.isfinite(optax.global_norm(gradient))
    updates, optimizer = make_optimizer(plan.recipe, plan.steps).update(gradient, state.optimizer, state.trained)
    updated = State(optax.apply_updates(state.trained, updates), optimizer, state.step + 1)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
    return state, TrainingOutcome(loss, report, finite)


train_step = jit(compute_step, static_argnames="plan", donate_argnames="state")
"""Jitted `compute_step`. The state is donated and cannot be used again."""


def main_dtype(params: PyTree) -> str:
    """Return the most frequent floating-point dtype of parameters."""
    floats = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return str(max(floats, key=floats.count))


def export_trainable(trainable: Trainable, state: State, frozen: PyTree) -> Any:
    """Return the trainable with the parameters of the state, in its own dtypes.

    The result stays valid when a step donates the state.
    """
    merged = merge_params(jax.tree.map(jnp.copy, state.trained), frozen)
    params = jax.tree.map(lambda x, old: x.astype(old.dtype), merged, trainable.params)
    return dataclasses.replace(trainable, params=params)
