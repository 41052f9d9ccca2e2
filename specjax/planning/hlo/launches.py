"""Launches of a GPU program: kernels, and loops and branches that the host steers.

A fusion, a library call, a copy or a collective is one launch. The host reads the condition of a loop of unknown length
before each iteration and once more, and the predicate of each branch, unless a CUDA graph contains the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from specjax.arrays import scopes
from specjax.planning.hlo.control_flow import Taken, Trips, always, visits
from specjax.planning.hlo.flops import is_library_product
from specjax.planning.hlo.parsing import FREE, Instruction, Module


class KernelCounts(NamedTuple):
    """Kernels of a program, by their work."""

    products: float = 0.0  # matrix products
    attention: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.other


class LoopUse(NamedTuple):
    """A loop and its iterations."""

    name: str  # of the operation in the program, such as jit(step)/while
    depth: int  # number of loops around it
    executions: float
    iterations: float  # per execution
    known: bool  # False: the number of iterations depends on the data


def is_launch(instruction: Instruction) -> bool:
    """Return True for an instruction that is a kernel, a library call, a copy or a collective."""
    return (
        instruction.opcode not in FREE
        and not instruction.opcode.endswith("-done")
        and (instruction.opcode not in ("async-start", "async-update"))
    )  # its computation has the kernel


def count_kernels(module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always) -> KernelCounts:
    """Count the launches of a program."""
    counts = dict.fromkeys(KernelCounts._fields, 0.0)
    for visit in visits(module, trips, taken):
        if is_launch(visit.instruction):
            counts[_work_of(module, visit.instruction)] += visit.executions
    return KernelCounts(**counts)


def loop_uses(module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always) -> list[LoopUse]:
    """Return the loops that control flow reaches."""
    result = []
    for _, instruction, executions, loop, iterations in visits(module, trips, taken):
        if loop is not None:
            result.append(LoopUse(instruction.source, loop.depth, executions, iterations, loop.trips is not None))
    return result


def condition_reads(module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always) -> float:
    """Count the conditions of loops of unknown length and of branches that the host reads."""
    reads = 0.0
    for visit in visits(module, trips, taken):
        if visit.loop is not None and visit.loop.trips is None:
            reads += visit.executions * (visit.iterations + 1)
        elif visit.instruction.opcode == "conditional":
            reads += visit.executions
    return reads


def _work_of(module: Module, instruction: Instruction) -> str:
    """Return the field of KernelCounts for a launch."""
    parts = list(parts_of(module, instruction))
    if any(f"/{scopes.ATTENTION}/" in part.source for part in parts):
        return "attention"
    return "products" if any(map(_is_product, parts)) else "other"


def parts_of(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield an instruction, and the instructions inside of it if it is a fusion."""
    yield instruction
    if instruction.opcode == "fusion":
        for part in module.computations.get((instruction.called("calls") or [""])[0], {}).values():
            yield from parts_of(module, part)


def _is_product(instruction: Instruction) -> bool:
    """Return True for a matrix product. A product with one row may be a sum of elements."""
    if instruction.opcode == "dot" or is_library_product(instruction):
        return True
    return instruction.opcode == "reduce" and instruction.source.endswith("dot_general")
