"""The attention part and the feed-forward part of a model as two programs of their own, each for its devices."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.decoder import DecoderConfig
from specjax.models.hybrid.config import Feed, HybridConfig, LayerKind, Mixer
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.inputs.topologies import one_of
from specjax.planning.records import ProgramReport
from specjax.planning.stages.report import both_parts_of
from specjax.planning.workload import Workload, make_workload

VOCAB = 256
"""Tokens of the stages' models, whose output head takes almost no time."""


class StagePrograms(NamedTuple):
    """Reports on a step of all attention layers, and on a step of all feed-forward layers."""

    attention: ProgramReport
    feed: ProgramReport


def compile_stages(
    target: str | Any,
    topology: str,
    *,
    nodes: int = 1,
    split: tuple[int, int] = (1, 1),
    cache: bool = True,
    on_step: Notify | None = None,
    **options: Any,
) -> StagePrograms:
    """Compile the two stages of a model apart, by the compiler of the chips, without the transfers between them.

    The seconds of both reports, "roofline" and "schedule", are t_a and t_f of `specjax.planning.stages.pipeline`. The
    attention stage has the rows of one attention device. The feed-forward stage has all rows, and its devices share
    the experts, or the width of the MLPs of a dense model. Its sums over devices are included. Both include a step's
    other work, with a vocabulary of 256 tokens. The loop over the experts of a mixture counts one turn for each
    distinct expert that independent rows are expected to choose on the busiest device.

    Args:
      nodes: of a pass, per row.
      split: attention devices and feed-forward devices of the topology.
      cache, on_step: as in `compile_report`.
      options: arguments of `make_workload` without drafts and meshes: batch, context, dtype and others.

    Raises: UsageError for bad options, a missing compiler, or layers that cannot be separated or divided.
    """
    if not 1 <= nodes <= 512:
        raise UsageError(f"nodes must be a number from 1 to 512, not {nodes}")
    workloads = _stage_workloads(make_workload(target, topology, **options), split)
    notify = on_step or (lambda name: None)
    reports: list[ProgramReport] = []
    for name, work in zip(StagePrograms._fields, workloads, strict=True):
        reports += compile_programs(work, cache, notify, only=("step",), rename={"step": name}, nodes=nodes)
    return StagePrograms(*reports)


def _stage_workloads(work: Workload, split: tuple[int, int]) -> tuple[Workload, Workload]:
    """Return the plain workloads of both stages. Raises: UsageError for a split that the model does not have."""
    if work.reading is not None:
        raise UsageError(f"--target: {work.target.name} is a diffusion model, whose stages are not compiled")
    both_parts_of(work)
    attention, feed = split
    if min(split) < 1 or (sum(split) > work.topology.num_devices and split != (1, 1)):
        raise UsageError(
            f"--stages {attention}:{feed} needs at least one device of each stage and at most the "
            f"{work.topology.num_devices} of {work.topology.name}; give other numbers or more chips"
        )
    of_attention, of_feed = stage_configs(work.target)
    plain = dataclasses.replace(work.plain, topology=one_of(work.topology.chip), model=1)
    rows = dataclasses.replace(plain, target=of_attention, batch=-(-work.batch // attention))
    if feed == 1:
        return rows, dataclasses.replace(plain, target=of_feed)
    parts, sizes = f"--stages {attention}:{feed}: {feed} feed-forward devices do not divide", work.target.experts
    if sizes is not None and sizes.num_experts % feed:
        raise UsageError(f"{parts} the {sizes.num_experts} experts of {work.target.name}; give a divisor")
    if sizes is None and work.target.mlp_width % feed:
        raise UsageError(f"{parts} the {work.target.mlp_width} hidden units of {work.target.name}; give a divisor")
    model, expert = (feed, 1) if sizes is None else (1, feed)
    return rows, dataclasses.replace(plain, target=of_feed, topology=work.topology, model=model, expert=expert)


def stage_configs(config: DecoderConfig) -> tuple[HybridConfig, HybridConfig]:
    """Return the configs of models that have only the attention part or the feed-forward part of each layer.

    Raises: UsageError for layers with norms after their sublayers only, or with feed-forward parts of several widths.
    """
    if isinstance(config, HybridConfig):
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    else:
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(DecoderConfig)}
    kinds = _kinds(config)
    values |= {"vocab_size": VOCAB, "tied": True, "is_global": None}
    attention: dict[str, Any] = {"kinds": tuple(kind._replace(feed="none") for kind in kinds), "experts": None}
    feed: dict[str, Any] = {"kinds": tuple(LayerKind("none", kind.feed, kind.changes) for kind in kinds)}
    return (
        HybridConfig(**values | attention | {"name": f"{config.name}-attention"}),
        HybridConfig(**values | feed | {"name": f"{config.name}-feed"}),
    )


def _kinds(config: DecoderConfig) -> tuple[LayerKind, ...]:
    """Return the kind of each layer of any decoder."""
    if isinstance(config, HybridConfig):
        return config.kinds
    dense = range(config.num_layers) if config.experts is None else config.experts.dense_layers
    feeds: list[Feed] = ["gated" if layer in dense else "moe" for layer in range(config.num_layers)]
    mixer: Mixer = "attention" if config.latent is None else "latent_attention"
    is_global = config.is_global or (False,) * config.num_layers
    changes = [(("window", None),) if is_full and config.window is not None else () for is_full in is_global]
    return tuple(LayerKind(mixer, feed, change) for feed, change in zip(feeds, changes, strict=True))
