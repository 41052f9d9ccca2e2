"""Costs of decoding with a diffusion model: its programs, and a block as a function of the columns per pass."""

from __future__ import annotations

import math

from specjax.costs.roofline import CLOCKS
from specjax.planning import denoising
from specjax.planning.compiler import Notify, compile_programs
from specjax.planning.records import BlockRow, ProgramReport
from specjax.planning.workload import Workload

SOME = (1, 2, 4, 8, 16, 32)  # columns per pass


def programs_and_blocks(
    work: Workload, cache: bool, notify: Notify
) -> tuple[list[ProgramReport], tuple[BlockRow, ...], dict[str, int]]:
    """Return the reports on all programs, the rows by columns per pass, and the sizes of window and canvas."""
    width = denoising.window(work)
    program_reports = compile_programs(work, cache, notify)
    sizes = {"window": width, "canvas": work.context + work.max_new_tokens}
    return program_reports, _blocks(work, {program.name: program for program in program_reports}, width), sizes


def _blocks(work: Workload, program_reports: dict[str, ProgramReport], width: int) -> tuple[BlockRow, ...]:
    """Return one row per number of columns in a pass.

    The result is empty if passes decide by acceptance, or do not compile.
    """
    denoiser, method_procedure = denoising.shape(work)
    one, renewing = program_reports["pass"], program_reports.get(denoising.renewal(work) or "")
    if method_procedure.verify is not None or not all(program.compiles for program in (one, renewing or one)):
        return ()
    return tuple(
        _row(columns, width, one, renewing, denoiser.is_causal, denoiser.seeding == "seed_and_mask")
        for columns in sorted({min(n, width) for n in SOME})
    )


def _row(
    columns: int, width: int, one: ProgramReport, renewing: ProgramReport | None, causal: bool, seeded: bool
) -> BlockRow:
    """Compute the cost of a block with one pass per `columns`.

    A fused clean pass is part of the first pass. Otherwise it is an additional pass, which decides a column in seeded
    models.
    """
    looks = math.ceil((width - seeded) / columns)
    fused = causal and renewing is not None
    passes = looks + (causal and not fused)
    first = renewing or one
    block = {clock: first.seconds[clock] + (passes - 1) * one.seconds[clock] for clock in CLOCKS}
    apart = {clock: (passes + 1) * one.seconds[clock] for clock in CLOCKS} if fused else {}
    return BlockRow(
        columns=columns,
        passes=passes,
        passes_apart=passes + 1 if fused else None,
        seconds_per_token={clock: seconds / width for clock, seconds in block.items()},
        gain={clock: seconds / block[clock] for clock, seconds in apart.items()},
    )
