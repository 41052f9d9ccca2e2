"""Changes with which a program fits that is too large without them."""

from __future__ import annotations

import dataclasses

from specjax.engine.prefill import CHUNK
from specjax.models.layout import fits_heads
from specjax.planning.abstract import shard_bytes
from specjax.planning.compiler import Notify, build, compile_programs
from specjax.planning.inputs.topologies import larger
from specjax.planning.records import Fit, ProgramReport
from specjax.planning.workload import Workload

TRIES = 4  # compilations per kind of change


def suggest(work: Workload, program_reports: list[ProgramReport], cache: bool, notify: Notify) -> list[Fit]:
    """Return the smallest change of each kind with which the largest program that does not fit compiles.

    The kinds are more devices for the model, a smaller batch, and a shorter context. Each change is compiled, unless
    its arguments alone are too large.
    """
    refused = [p for p in program_reports if not p.compiles and p.needed_bytes is not None]
    if not refused:
        return []
    failed = max(refused, key=lambda p: p.needed_bytes or 0)
    plain = failed.name == "plain step"
    base = work.plain if plain else work
    name = "step" if failed.name.endswith("step") else failed.name
    fits = []
    for changes in (_more_devices(base), _halved(base, "batch", "--batch-size", base.data), _halved(
            base, "context", "--context", CHUNK)):  # fmt: skip
        for change, smaller in changes[:TRIES]:
            if _arguments(smaller) > smaller.topology.chip.hbm_bytes:
                continue
            notify(f"{name} with {change}")
            report = compile_programs(smaller, cache, lambda _: None, only=(name,))[0]
            if report.memory is not None and report.memory.total <= smaller.topology.chip.hbm_bytes:
                fits.append(Fit(change, report.memory.total))
                break
    return fits


def _more_devices(work: Workload) -> list[tuple[str, Workload]]:
    """Return the same slice with all devices, then larger slices, for as long as the model can be split over them."""
    changes = []
    model, topology, other_axes = work.model, work.topology, work.devices // work.model
    fits = lambda model: fits_heads(work.target, work.layer * model)
    while other_axes * model * 2 <= topology.num_devices and fits(model * 2):
        model *= 2
        changes.append((f"--model {model}", dataclasses.replace(work, model=model)))
    while (bigger := larger(topology)) is not None:
        topology, model = bigger, bigger.num_devices // other_axes
        if not fits(model) or work.target.mlp_width % model:
            break
        changes.append((f"--topology {topology.name}", dataclasses.replace(work, topology=topology, model=model)))
    return changes


def _halved(work: Workload, name: str, flag: str, minimum: int) -> list[tuple[str, Workload]]:
    changes, value = [], getattr(work, name)
    while value // 2 >= minimum and (value // 2) % (work.data if name == "batch" else 1) == 0:
        value //= 2
        changes.append((f"{flag} {value}", dataclasses.replace(work, **{name: value})))
    return changes


def _arguments(work: Workload) -> int:
    """Return the bytes per device of the parameters and the cache of a workload, without compiling."""
    built, _ = build(work)
    step = next(p for p in built.programs if p.name in ("step", "pass"))
    return shard_bytes(step.arguments)
