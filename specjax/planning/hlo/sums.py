"""Sums over a program: cycles, FLOPs, bytes to and from HBM, collectives."""

from __future__ import annotations

import math
import re

from specjax.costs.roofline import Collective, Kernel, Totals
from specjax.planning.hlo.control_flow import Taken, Trips, always, walk
from specjax.planning.hlo.flops import float32_flops_of, flops_of
from specjax.planning.hlo.hbm import kernel_of, traffic
from specjax.planning.hlo.launches import condition_reads, is_launch
from specjax.planning.hlo.parsing import COLLECTIVES, Instruction, Module


def totals(module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always, used: Taken = always) -> Totals:
    """Sum cycles, FLOPs, bytes to and from HBM, and collectives.

    used: (call of a Pallas kernel) -> share of its authors' estimate that an average execution takes.
    """
    cycles = flops = of_float32 = moved = instructions = 0.0
    kernels = Kernel(0)
    collectives: dict[tuple[str, int], list[float]] = {}
    for name, instruction, times in walk(module, trips, taken):
        computation = module.computations[name]
        cycles += times * instruction.cycles
        flops += times * flops_of(module, computation, instruction)
        of_float32 += times * float32_flops_of(module, computation, instruction)
        kernel = kernel_of(instruction)
        share = 1.0 if kernel is None else used(instruction)
        moved += times * share * traffic(module, computation, instruction)
        instructions += times * is_launch(instruction)
        if kernel is not None:
            worth = times * share
            kernels = Kernel(
                kernels.calls + times, kernels.flops + worth * kernel.flops, kernels.bytes + worth * kernel.bytes
            )
            flops += worth * kernel.flops
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            size, wire, group = _sent(computation, instruction, kind)
            sums = collectives.setdefault((kind, group), [0.0, 0.0, 0.0])
            for place, value in enumerate((1, size, wire)):
                sums[place] += times * value
    collective_sums = tuple(
        Collective(kind, count, size, wire, group) for (kind, group), (count, size, wire) in sorted(collectives.items())
    )
    reads = condition_reads(module, trips, taken)
    return Totals(cycles, flops, moved, instructions, kernels, collective_sums, of_float32, reads)


def _sent(computation, instruction: Instruction, kind: str) -> tuple[float, float, int]:
    """Return (bytes of the result, bytes that a device sends on a ring, devices of a group)."""
    group = _group_size(instruction.attributes)
    operands = sum(a.bytes for name in instruction.operands if name in computation for a in computation[name].arrays)
    share = (group - 1) / group if group > 1 else 1.0
    size, wire = {
        "all-reduce": (operands, 2 * share * operands),
        "all-gather": (operands * group, (group - 1) * operands),
        "reduce-scatter": (operands / group, share * operands),
        "all-to-all": (operands, share * operands),
    }.get(kind, (operands, operands))
    return size, wire, group


def _group_size(attributes: str) -> int:
    """Parse replica_groups={{0,1},{2,3}}, [4,2]<=[8] (groups, devices per group) or mesh['x'=2,'y'=4] {'y'}."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        selected = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named.group(2))  # a whole axis, or a part of one
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in selected)
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return len(listed.group(1).split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes)
    return int(counted.group(2)) if counted else 1
