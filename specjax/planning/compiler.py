"""Compilation of a workload's programs, and the compiler's figures for each."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable

from specjax.costs import roofline
from specjax.files.sizes import gib
from specjax.planning import denoising, drafting, hlo, programs, report_cache
from specjax.planning.inputs.topologies import describe_devices
from specjax.planning.programs import Program, Programs
from specjax.planning.records import MemoryUse, ProgramReport
from specjax.planning.traffic import must_bytes
from specjax.planning.workload import Workload

Notify = Callable[[str], None]
"""(name of a program) -> None, called before the program is compiled."""

ROUNDS_AT = 0.7  # acceptance rate that is assumed for the complete loop


def compile_programs(
    work: Workload,
    cache: bool,
    notify: Notify,
    *,
    only: tuple[str, ...] | None = None,
    rename: dict[str, str] | None = None,
    nodes: int | None = None,
) -> list[ProgramReport]:
    """Return reports on the programs named in `only`, or on all programs.

    Args:
      rename: names of programs in the result, by their names in `only`.
      nodes: number of nodes to verify, with a draft without cost. None: the workload's method.
    """
    rename = rename or {}
    if only is None:
        only = ("prefill", "step", "loop") if work.reading is None else denoising.names_of(work)
    reports: dict[str, ProgramReport] = {}
    for name in only:
        cached = report_cache.load(work, name, nodes) if cache else None
        if cached is not None:
            reports[name] = cached
    missing = [name for name in only if name not in reports]
    if missing:
        built, needed = build(work, nodes)
        for program in built.programs:
            if program.name in missing:
                notify(rename.get(program.name, program.name))
                reports[program.name] = compile_program(work, program, needed[program.name])
                if cache:
                    report_cache.save(work, program.name, nodes, reports[program.name])
    return [dataclasses.replace(reports[name], name=rename.get(name, name)) for name in only]


def build(work: Workload, nodes: int | None = None) -> tuple[Programs, dict[str, float]]:
    """Return the programs of a workload, and the bytes that a device has to move in each.

    `nodes` is as in `compile_programs`.
    """
    devices = describe_devices(work.topology)
    if work.reading is not None:
        return denoising.build(work, devices)
    drafter = None if nodes is None else drafting.probe(nodes)
    rounds = math.ceil(work.max_new_tokens / (drafting.tokens_of(work)(ROUNDS_AT) if nodes is None else 1.0))
    built = programs.build(work, devices, drafter=drafter, rounds=rounds)
    passes = 0 if nodes is not None else drafting.draft_passes(work)
    return built, must_bytes(work, built.arguments, built.state, passes, rounds)


def compile_program(work: Workload, program: Program, required_bytes: float) -> ProgramReport:
    """Compile one program and report on it. A device must move at least `required_bytes` bytes."""
    chip = work.topology.chip
    start = time.perf_counter()
    try:
        compiled = program.compiled()
    except Exception as error:  # a program that the compiler rejects is a result, such as one that is too large
        return _refused(work, program, str(error) or type(error).__name__)
    seconds = time.perf_counter() - start
    module = hlo.parse(compiled.as_text())
    totals = hlo.totals(module, program.trips, program.taken, program.used)
    m = compiled.memory_analysis()
    memory = MemoryUse(
        m.argument_size_in_bytes, m.temp_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, chip.hbm_bytes
    )
    if memory.total > memory.available:  # the CUDA compiler does not refuse such a program
        return _too_large(work, program, memory.total)
    vocab = work.target.vocab_size
    findings_in_program = hlo.findings(module, program.trips, program.taken, vocab_size=vocab, large=program.large)
    parts = frozenset({vocab, vocab // (work.devices // work.data)})
    logits = hlo.largest_logits(module, program.trips, program.taken, vocab_sizes=parts)
    return ProgramReport(
        name=program.name,
        compiles=True,
        compile_seconds=seconds,
        memory=memory,
        flops=totals.flops,
        moved_bytes=totals.hbm_bytes,
        must_bytes=required_bytes,
        cycles=totals.cycles,
        kernel_calls=totals.kernels.calls,
        kernels=hlo.count_kernels(module, program.trips, program.taken)._asdict() if chip.launches else {},
        loops=tuple(use._asdict() for use in hlo.loop_uses(module, program.trips, program.taken)),
        seconds=dataclasses.asdict(roofline.estimate(chip, totals, required_bytes)),
        collectives=tuple(dataclasses.asdict(entry) for entry in totals.collectives),
        findings=tuple(dataclasses.asdict(entry) for entry in findings_in_program),
        assumed=program.assumed if hlo.dynamic_loops(module) else {},
        logits=logits and {**logits._asdict(), "shape": list(logits.shape)},  # the form in which a file is read back
    )


def _refused(work: Workload, program: Program, message: str) -> ProgramReport:
    needed = needed_bytes(message)
    if needed is not None:
        return _too_large(work, program, needed)
    return ProgramReport(program.name, False, reason=" ".join(message.split())[:300])


def _too_large(work: Workload, program: Program, needed: int) -> ProgramReport:
    chip = work.topology.chip
    reason = f"it needs {gib(needed)} of HBM and a {chip.name} device has {gib(chip.hbm_bytes)}"
    return ProgramReport(program.name, False, reason=reason, needed_bytes=needed)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"


def needed_bytes(message: str) -> int | None:
    """Parse the HBM that a rejected program needed from the compiler's message; None for another reason."""
    for pattern in (
        rf"total memory required for [\w ]+\({_SIZE}\) exceeds available HBM",
        rf"Used {_SIZE} of {_SIZE} hbm",
        rf"Exceeded hbm capacity.*?Total hbm usage >= {_SIZE}",
    ):
        match = re.search(pattern, message, re.IGNORECASE | re.DOTALL)
        if match:
            return int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    return None
