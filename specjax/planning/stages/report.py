"""The plan of attention and feed-forward stages for a model and chips, estimated from shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specjax.errors import UsageError
from specjax.files.sizes import gib
from specjax.planning.memory import available_bytes, slots_of
from specjax.planning.stages.parts import StageParts, parts_of
from specjax.planning.stages.pipeline import (
    StageSplit,
    attention_bytes,
    attention_seconds,
    balance_nodes,
    every_split,
    feed_bytes,
    feed_seconds,
    transfer_seconds,
)
from specjax.planning.tree.plan import WIDTHS, check_widths
from specjax.planning.workload import Workload, make_workload

MOST_MICRO_BATCHES = 8
"""Largest number of micro-batches that a plan tries. More of them read the weights more often."""

WITHOUT = {"data", "model", "layer", "sequence", "expert"}
"""Axes of a mesh, which a plan of stages does not have, because it divides the devices itself."""
DRAFTING = {"draft", "head", "method", "tree", "num_draft_tokens", "options"}
"""Arguments of `make_workload` for drafts, whose cost is in neither stage."""

LIMITS = (
    "estimates from bytes, operations and published bandwidths, with experts and rows that are equally busy; no link "
    "was measured, so this is no promise of throughput"
)


@dataclass(frozen=True)
class StageRow:
    """A pass over `nodes` nodes of each row of the batch. Seconds are those of all layers."""

    nodes: int
    attention_seconds: float  # with both stages on all devices
    feed_seconds: float  # with both stages on all devices
    together_seconds: float  # the sum of both, without the exchange
    exchange_seconds: float  # in which rows and experts on different devices exchange the stream, in both directions
    together_bytes: int  # per device
    together_fits: bool
    balance_rows: float  # rows whose feed-forward weights are read in the time of their products
    split: StageSplit  # the fastest division of the devices that fits
    ratio: float  # together_seconds / step_seconds of the split: above 1, separate devices are faster
    ratio_with_exchange: float  # the same if both stages together do not hide their exchange


@dataclass(frozen=True)
class StagePlan:
    """Passes of a model over 1, 2, 4, ... nodes per row, with their stages together and on separate devices."""

    target: str
    topology: str
    devices: int
    batch: int
    context: int
    dtype: str
    experts: tuple[int, int] | None  # number of experts, and of those chosen for a token; None: a dense model
    rows: tuple[StageRow, ...]
    limits: str = LIMITS  # what the figures are not

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)


def plan_stages(
    target: str | Any,
    topology: str,
    *,
    widths: Sequence[int] = WIDTHS,
    micro_batches: int | None = None,
    **options: Any,
) -> StagePlan:
    """Estimate attention and feed-forward layers on separate devices, as in Step-3. Nothing is compiled.

    For plain decoding and for trees, the plan has the seconds of both stages on all devices, and the fastest division
    into attention devices and feed-forward devices. `specjax.planning.stages.pipeline` has the formulas.

    Args:
      target: a built-in config, a folder, a GGUF file or a config; a dense model or a mixture of experts.
      topology: at least two chips, such as "v5e:2x4".
      widths: numbers of nodes per row of a pass. 1 is plain decoding, and is always in the plan.
      micro_batches: parts of the batch that are in different stages at a time. None: the fastest number up to 8.
      options: arguments of `make_workload` without drafts and meshes: batch, context, dtype, quantize and others.

    Raises: UsageError for bad options, one device, a model without one of the parts, or weights that fit no division.
    """
    for name in sorted((WITHOUT | DRAFTING) & set(options)):
        reason = "divides the devices itself" if name in WITHOUT else "counts target passes only"
        raise UsageError(f"a plan of stages {reason}, and has no {name}; leave it out")
    work = make_workload(target, topology, **options)
    sizes, counts = check_widths(widths, has_trees=False), _counts(work.batch, micro_batches)
    _check(work)
    parts = both_parts_of(work)
    experts = parts.sizes and (parts.sizes.num_experts, parts.sizes.routing.num_chosen)
    return StagePlan(
        target=work.target.name,
        topology=work.topology.name,
        devices=work.topology.num_devices,
        batch=work.batch,
        context=work.context,
        dtype=work.target.dtype,
        experts=experts,
        rows=tuple(_row(work, parts, nodes, counts) for nodes in sizes),
    )


def both_parts_of(work: Workload) -> StageParts:
    """Return the parts of the target. Raises: UsageError for a model without one of them."""
    parts = parts_of(work.target, work.context)
    if not parts.attention.bytes or not parts.feed.bytes + parts.experts.bytes:
        missing = "feed-forward" if parts.attention.bytes else "attention"
        raise UsageError(f"--target: {work.target.name} has no {missing} layers, so it has no two stages")
    return parts


def _row(work: Workload, parts: StageParts, nodes: int, counts: Sequence[int]) -> StageRow:
    """Return a row of the plan. Raises: UsageError if no division of the devices has room for the model."""
    chip, devices = work.topology.chip, work.topology.num_devices
    slots, room = slots_of(work, work.context, nodes), available_bytes(chip.hbm_bytes)
    splits = every_split(parts, chip, devices, work.batch, nodes, counts, slots)
    fitting = [split for split in splits if split.needed_bytes <= room]
    if not fitting:
        needed = min(split.needed_bytes for split in splits)
        raise UsageError(
            f"--topology: no division of the {devices} devices of {work.topology.name} has room for "
            f"{work.target.name}: the best needs {gib(needed)} of {gib(room)} per device; give more chips, fewer rows "
            "or --quantize"
        )
    best = min(fitting, key=lambda split: split.step_seconds)
    device_rows = -(-work.batch // devices)
    t_a = attention_seconds(parts, chip, device_rows, nodes)
    t_f = feed_seconds(parts, chip, work.batch * nodes) / devices
    exchange = 2 * transfer_seconds(parts, chip, work.batch * nodes, devices)
    needed = attention_bytes(parts, device_rows, devices, slots) + feed_bytes(parts, devices)
    return StageRow(
        nodes=nodes,
        attention_seconds=t_a,
        feed_seconds=t_f,
        together_seconds=t_a + t_f,
        exchange_seconds=exchange,
        together_bytes=needed,
        together_fits=needed <= room,
        balance_rows=balance_nodes(parts, chip) / nodes,
        split=best,
        ratio=(t_a + t_f) / best.step_seconds,
        ratio_with_exchange=(t_a + t_f + exchange) / best.step_seconds,
    )


def _check(work: Workload) -> None:
    """Raise a UsageError for diffusion models, and for a single device."""
    if work.reading is not None:
        raise UsageError(f"--target: {work.target.name} is a diffusion model, which --stages does not plan")
    if work.topology.num_devices < 2:
        raise UsageError(
            f"--topology: {work.topology.name} is one device, and two stages need two; give more chips, such as "
            f"{work.topology.chip.name}:{'2' if work.topology.chip.dimensions == 1 else '2x2'}"
            f"{'x1' if work.topology.chip.dimensions == 3 else ''}"
        )


def _counts(batch: int, micro_batches: int | None) -> Sequence[int]:
    """Return the numbers of micro-batches to try. Raises: UsageError for more of them than rows, or none."""
    if micro_batches is None:
        return range(1, min(batch, MOST_MICRO_BATCHES) + 1)
    if not 1 <= micro_batches <= batch:
        raise UsageError(
            f"--micro-batches must be a number from 1 to the {batch} rows of --batch-size, not {micro_batches}"
        )
    return (micro_batches,)
