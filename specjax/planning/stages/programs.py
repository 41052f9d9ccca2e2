"""The attention part and the feed-forward part of a model as two programs of their own, compiled for one device."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.decoder import DecoderConfig
from specjax.models.hybrid.config import Feed, HybridConfig, LayerKind, Mixer
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.inputs.topologies import one_of
from specjax.planning.records import ProgramReport
from specjax.planning.workload import make_workload

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
    cache: bool = True,
    on_step: Notify | None = None,
    **options: Any,
) -> StagePrograms:
    """Compile the two stages of a model apart, each for one device of `topology`, by the compiler of its platform.

    The seconds of both reports, "roofline" and "schedule", are t_a and t_f of `specjax.planning.stages.pipeline` for
    the rows of one attention device, and for a feed-forward device that has all layers. They include a step's other
    work, with a vocabulary of 256 tokens. The loop over the experts of a mixture counts one turn for each distinct
    expert that independent rows are expected to choose.

    Args:
      nodes: of a pass, per row.
      cache, on_step: as in `compile_report`.
      options: arguments of `make_workload` without drafts and meshes: batch, context, dtype and others.

    Raises: UsageError for bad options, a missing compiler, or layers that cannot be separated.
    """
    if not 1 <= nodes <= 512:
        raise UsageError(f"nodes must be a number from 1 to 512, not {nodes}")
    work = make_workload(target, topology, **options)
    if work.reading is not None:
        raise UsageError(f"--target: {work.target.name} is a diffusion model, whose stages are not compiled")
    notify = on_step or (lambda name: None)
    reports: list[ProgramReport] = []
    for name, config in zip(StagePrograms._fields, stage_configs(work.target), strict=True):
        one = dataclasses.replace(work.plain, target=config, topology=one_of(work.topology.chip), model=1)
        reports += compile_programs(one, cache, notify, only=("step",), rename={"step": name}, nodes=nodes)
    return StagePrograms(*reports)


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
