"""The report on a decode: its programs, its speed-up over plain decoding, and configurations that fit."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.costs.roofline import clocks_of
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.drafting import tokens_of
from specjax.planning.records import PlanReport, ProgramReport, SpeedUp
from specjax.planning.report_cache import versions
from specjax.planning.reports.denoising import programs_and_blocks
from specjax.planning.reports.suggestions import suggest
from specjax.planning.workload import Workload, describe, make_workload

ACCEPTANCE_RATES = (0.3, 0.5, 0.7, 0.8, 0.9)
"""Rows of the table of speed-ups."""


def compile_report(
    target: str | Any, topology: str, *, cache: bool = True, on_step: Notify | None = None, **options: Any
) -> PlanReport:
    """Compile a decode for absent TPUs or GPUs, and report its memory, its traffic and estimates of its speed.

    Args:
      target: a built-in config name, a Hugging Face folder or a GGUF file (no weights are read), or a config.
      topology: a slice of chips such as "v5e:2x4", or GPUs of one machine such as "h200:8".
      cache: store results on disk. on_step: called with the name of each program before it is compiled.
      options: arguments of `make_workload`: draft, head, method, tree, num_draft_tokens, options, batch, context,
        max_new_tokens, dtype, cache_dtype, same_bits, temperature, top_k, top_p, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, data, model, layer, sequence, expert. Diffusion models also
        accept reading and block, and models that read images image_tiles and image_patches.

    Raises: UsageError for bad options or a missing compiler. A program that does not compile is a result.
    """
    return report_on(make_workload(target, topology, **options), cache, on_step or (lambda name: None))


def report_on(work: Workload, cache: bool, notify: Notify) -> PlanReport:
    """Return the report on a workload, like `compile_report`."""
    if work.reading is not None:
        return _of_denoising(work, cache, notify)
    plain = work.plain
    program_reports: list[ProgramReport] = []
    speedups: list[SpeedUp] = []
    ratio: dict[str, float] = {}
    if work.method == "autoregressive":
        program_reports = compile_programs(work, cache, notify)
    else:
        program_reports += compile_programs(plain, cache, notify, only=("step",), rename={"step": "plain step"})
        program_reports += compile_programs(work, cache, notify, rename={"step": f"{work.method} step"})
        steps = program_reports[0], next(p for p in program_reports if p.name == f"{work.method} step")
        if all(p.compiles for p in steps):
            ratio = {side: steps[1].seconds[side] / steps[0].seconds[side] for side in ("roofline", "schedule")}
            tokens = tokens_of(work)
            for rate in ACCEPTANCE_RATES:
                e = tokens(rate)
                speedups.append(SpeedUp(rate, e, e / ratio["roofline"], e / ratio["schedule"]))
    fits = suggest(work, program_reports, cache, notify)
    return PlanReport(
        describe(work), _chip(work), versions(), tuple(program_reports), tuple(speedups), ratio, tuple(fits),
        clocks=clocks_of(work.topology.chip),
    )  # fmt: skip


def _of_denoising(work: Workload, cache: bool, notify: Notify) -> PlanReport:
    """Return the report on a diffusion model."""
    program_reports, blocks, window = programs_and_blocks(work, cache, notify)
    fits = tuple(suggest(work, program_reports, cache, notify))
    return PlanReport(
        describe(work), _chip(work), versions(), tuple(program_reports), fits=fits, blocks=blocks, window=window,
        clocks=clocks_of(work.topology.chip),
    )  # fmt: skip


def _chip(work: Workload) -> dict[str, Any]:
    return dataclasses.asdict(work.topology.chip) | {"clock": work.topology.chip.clock}
