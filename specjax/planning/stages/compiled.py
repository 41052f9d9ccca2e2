"""Compiled stages beside the formulas of the plan, for passes over several numbers of nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specjax.planning.compiler import Notify
from specjax.planning.records import ProgramReport
from specjax.planning.stages.parts import parts_of
from specjax.planning.stages.pipeline import attention_seconds, feed_seconds
from specjax.planning.stages.programs import compile_stages
from specjax.planning.stages.report import LIMITS
from specjax.planning.tree.plan import check_widths
from specjax.planning.workload import make_workload


@dataclass(frozen=True)
class StagePass:
    """Both stages of a pass over `nodes` nodes of each row."""

    nodes: int
    attention_formula: float  # seconds, by `specjax.planning.stages.pipeline`
    feed_formula: float
    attention: ProgramReport
    feed: ProgramReport


@dataclass(frozen=True)
class CompiledStages:
    """The stages of a model, compiled for their devices."""

    target: str
    topology: str
    attention_devices: int
    feed_devices: int
    batch: int
    context: int
    dtype: str
    experts: tuple[int, int] | None  # number of experts, and of those chosen for a token; None: a dense model
    passes: tuple[StagePass, ...]
    limits: str = LIMITS  # what the formulas are not

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)


def compile_stage_passes(
    target: str | Any,
    topology: str,
    *,
    widths: Sequence[int] = (1, 16),
    split: tuple[int, int] = (1, 1),
    cache: bool = True,
    on_step: Notify | None = None,
    **options: Any,
) -> CompiledStages:
    """Compile both stages of a model for passes over several numbers of nodes, beside the formulas of `plan_stages`.

    Args:
      widths: numbers of nodes per row of a pass. 1 is plain decoding, and is always compiled.
      split, cache, on_step, options: as in `compile_stages`.

    Raises: UsageError as `compile_stages` does.
    """
    sizes = check_widths(widths, has_trees=False)
    passes = []
    for nodes in sizes:
        notify = None if on_step is None else lambda name, nodes=nodes: on_step(f"{name}, {nodes} nodes")
        stages = compile_stages(target, topology, nodes=nodes, split=split, cache=cache, on_step=notify, **options)
        passes.append((nodes, stages))
    work = make_workload(target, topology, **options)
    parts, chip, (attention, feed) = parts_of(work.target, work.context), work.topology.chip, split
    rows = -(-work.batch // attention)
    return CompiledStages(
        target=work.target.name,
        topology=work.topology.name,
        attention_devices=attention,
        feed_devices=feed,
        batch=work.batch,
        context=work.context,
        dtype=work.target.dtype,
        experts=parts.sizes and (parts.sizes.num_experts, parts.sizes.routing.num_chosen),
        passes=tuple(
            StagePass(
                nodes,
                attention_seconds(parts, chip, rows, nodes),
                feed_seconds(parts, chip, work.batch * nodes) / feed,
                *stages,
            )
            for nodes, stages in passes
        ),
    )
