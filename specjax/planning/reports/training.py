"""The report on a training step of a draft head for absent TPUs or GPUs: its memory and its tokens per second."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specjax.costs.roofline import CLOCKS
from specjax.errors import UsageError
from specjax.planning.abstract import abstract_job, shard_bytes
from specjax.planning.compiler import Notify, compile_program
from specjax.planning.inputs.topologies import describe_devices
from specjax.planning.programs import Program, compile_for
from specjax.planning.records import ProgramReport
from specjax.planning.workload import Workload, describe, make_workload
from specjax.training.data.packing import PackedBatch
from specjax.training.loop.optimizers import split_params
from specjax.training.loop.step import State, TrainingPlan, init_state, main_dtype, train_step
from specjax.training.objectives.recipes import Recipe, recipe_of
from specjax.training.objectives.trainables import build_head_objective
from specjax.types import PyTree

STEPS = 1000  # steps of the learning-rate schedule, without effect on the costs


class TrainingReport(NamedTuple):
    """A training step, per device."""

    inputs: dict[str, Any]  # options of the report
    program: ProgramReport
    places: int  # tokens with a loss, in all rows

    def rate(self, clock: str) -> float:
        """Return places per second by "roofline" or "schedule"."""
        return self.places / self.program.seconds[clock]

    def to_json(self) -> dict[str, Any]:
        rates = {clock: self.rate(clock) for clock in CLOCKS} if self.program.compiles else {}
        return {**self.inputs, "places": self.places, "places_per_second": rates, **dataclasses.asdict(self.program)}


def training_report(
    target: str | Any,
    topology: str,
    *,
    head: str,
    rows: int = 8,
    length: int = 2048,
    accumulate: int = 1,
    places: int | None = None,
    chunk: int | None = None,
    recipe: Recipe | None = None,
    on_step: Notify | None = None,
    **options: Any,
) -> TrainingReport:
    """Compile `specjax.training.train_step`. No weights are read.

    Args:
      target, topology, head: as in `compile_report`. rows, length: shape of a packed batch.
      accumulate: batches whose gradients are added in a step.
      places: start positions of drafts per row. The default is half of the row, as in a chat that is half responses.
      chunk: number of places whose loss is computed together.
      options: arguments of `make_workload`: dtype, data, model.

    Raises: UsageError for bad options or a missing compiler.
    """
    places = places or length // 2
    chunk = chunk if chunk is not None or places <= 128 else 128
    work = make_workload(target, topology, head=head, batch=rows, context=length, **options)
    if places > length or places % (chunk or 1):
        raise UsageError(f"places must be at most the {length} tokens of a row and a multiple of {chunk}, not {places}")
    recipe = recipe or recipe_of(work.method)
    program, depths = _program(work, _StepShape(rows, length, places, chunk, accumulate), recipe)
    (on_step or (lambda name: None))("training step")
    required_bytes = float(shard_bytes(program.arguments))
    training_inputs = {
        "rows": rows,
        "length": length,
        "accumulate": accumulate,
        "chunk": chunk,
        "depths": depths,
        "recipe": dataclasses.asdict(recipe),
    }
    return TrainingReport(
        describe(work) | training_inputs, compile_program(work, program, required_bytes), accumulate * rows * places
    )


class _StepShape(NamedTuple):
    """The shape of a step."""

    rows: int
    length: int
    places: int
    chunk: int | None
    parts: int


def _program(work: Workload, shape: _StepShape, recipe: Recipe) -> tuple[Program, int]:
    """Return the compiled step, and the drafted tokens per round."""
    args = abstract_job(work, describe_devices(work.topology))
    target, head, mesh = args.job.parts.target, args.head, args.mesh
    assert head is not None
    objective = build_head_objective(head.head)
    plan = TrainingPlan(recipe, objective, STEPS, shape.chunk, shape.parts, main_dtype(head.params))
    state, frozen = _state(plan, head.params, mesh)

    def by_rows(columns: int, dtype) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.ShapeDtypeStruct((shape.parts * shape.rows, columns), dtype, sharding=sharding)

    tokens = lambda dtype: by_rows(shape.length, dtype)
    packed = PackedBatch(tokens(jnp.int32), tokens(jnp.int32), tokens(jnp.bool_))
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = state, frozen, target, packed, by_rows(shape.places, jnp.int32), key

    def compiled():
        return compile_for(mesh, train_step.lower(plan, *arguments))

    return Program("training step", compiled, arguments, lambda loop: 1.0, {}, frozenset()), objective.depths(recipe)


def _state(plan: TrainingPlan, params: PyTree, mesh) -> tuple[State, PyTree]:
    """Return the result of `init_state`, with each optimizer array sharded like its parameter."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    trained, frozen = split_params(params, plan.recipe.frozen)
    shapes = jax.eval_shape(lambda params: init_state(plan, params)[0], params)
    shardings = {path: x.sharding for path, x in jax.tree_util.tree_leaves_with_path(trained)}

    def placed(path: tuple, x: Any) -> Any:  # the path of each moment ends with the path of its parameter
        sharding = next((shardings[path[i:]] for i in range(len(path)) if path[i:] in shardings), everywhere)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(placed, shapes), frozen
