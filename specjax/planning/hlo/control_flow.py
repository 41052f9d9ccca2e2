"""Control flow of a program: calls, branches, and loops with their iteration counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from specjax.planning.hlo.parsing import Instruction, Module


@dataclass(frozen=True)
class Loop:
    """A while loop and its place in the control flow."""

    instruction: Instruction
    depth: int  # number of loops around it
    path: tuple[str, ...]  # names of the loops around it
    index: int  # index among the data-dependent loops of its computation, in schedule order; -1: not one of them
    siblings: int  # number of data-dependent loops of its computation
    trips: int | None  # iterations; None: the number depends on the data


Trips = Callable[[Loop], float]
"""(loop) -> assumed iterations, for loops whose count depends on data."""

Taken = Callable[[Instruction], float]
"""(conditional) -> share, from 0 to 1, of executions in which its main branch runs (see `walk`).

In the others, the cheapest other branch runs.
"""


def always(conditional: Instruction) -> float:
    return 1.0


class Visit(NamedTuple):
    """An instruction that control flow reaches."""

    computation: str
    instruction: Instruction
    executions: float
    loop: Loop | None = None  # the loop, if the instruction is one
    iterations: float = 0.0  # of the loop, per execution


def walk(
    module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always
) -> Iterator[tuple[str, Instruction, float]]:
    """Yield (computation, instruction, executions) of everything that control flow reaches, like `visits`."""
    return (visit[:3] for visit in visits(module, trips, taken))


def visits(module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always) -> Iterator[Visit]:
    """Yield everything that control flow reaches. A fusion is one instruction.

    The main branch of a conditional runs with the share `taken`. The main branch is the one in which the scope around
    the conditional occurs again. Without such a branch, it is the one with the most cycles, or on a GPU the largest
    results (here the widest target pass). In the remaining executions the cheapest other branch runs.
    """

    def of(name: str, times: float, depth: int, path: tuple[str, ...]) -> Iterator[Visit]:
        loops = loops_of(module, name, depth, path)
        for instruction in module.computations.get(name, {}).values():
            loop = loops.get(instruction.name)
            if loop is not None:
                count = trips(loop) if loop.trips is None else loop.trips
                yield Visit(name, instruction, times, loop, count)
                for part in instruction.called("body", "condition"):
                    yield from of(part, times * count, depth + 1, (*path, instruction.name))
                continue
            yield Visit(name, instruction, times)
            if instruction.opcode == "conditional":
                branches = instruction.called("branch_computations", "true_computation", "false_computation")
                if branches:
                    size = lambda branch: _size(of(branch, 1.0, depth, path))
                    main, share = _named(module, instruction, branches) or max(branches, key=size), taken(instruction)
                    yield from of(main, times * share, depth, path)
                    if share < 1 and len(branches) > 1:
                        cheapest = min((branch for branch in branches if branch != main), key=size)
                        yield from of(cheapest, times * (1 - share), depth, path)
            elif instruction.opcode in ("call", "async-start"):
                for part in instruction.called("to_apply", "calls", "called_computations"):
                    yield from of(part, times, depth, path)

    return of(module.entry, 1.0, 0, ())


def _size(visits: Iterable[Visit]) -> tuple[float, float]:
    """Return the cycles and the bytes of the results of a branch. A GPU's compiler counts no cycles."""
    cycles = size = 0.0
    for _, instruction, times, *_ in visits:
        cycles += instruction.cycles * times
        size += sum(array.bytes for array in instruction.arrays) * times
    return cycles, size


def _named(module: Module, conditional: Instruction, branches: list[str]) -> str | None:
    """Return the branch in which the scope around a conditional occurs again, or None."""
    match = re.search(r"(?:^|/)([^/]+)/cond$", conditional.source)
    if match is None:
        return None
    again = re.compile(rf"/{re.escape(match.group(1))}/cond/branch_\d+_fun/{re.escape(match.group(1))}(/|$)")
    inside = lambda branch: any(again.search(i.source) for i in module.computations.get(branch, {}).values())
    return next(filter(inside, branches), None)


def loops_of(module: Module, name: str, depth: int = 0, path: tuple[str, ...] = ()) -> dict[str, Loop]:
    """Return the while loops of one computation, by name, in schedule order."""
    loops = [i for i in module.computations.get(name, {}).values() if i.opcode == "while"]
    counts = [trip_count(module, name, i) for i in loops]
    dynamic = [i.name for i, count in zip(loops, counts, strict=True) if count is None]
    place = {name: index for index, name in enumerate(dynamic)}
    return {
        i.name: Loop(i, depth, path, place.get(i.name, -1), len(dynamic), count)
        for i, count in zip(loops, counts, strict=True)
    }


def dynamic_loops(module: Module) -> list[Loop]:
    """Return the loops whose iteration count depends on data, outer loops first, each loop once."""
    result: list[Loop] = []

    def note(loop: Loop) -> float:
        if loop.instruction.name not in {other.instruction.name for other in result}:
            result.append(loop)
        return 1.0

    for _ in walk(module, note):
        pass
    return result


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Return the iterations of a loop, from the compiler's annotation or a counter with a constant limit, or None."""
    noted = re.search(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)', loop.attributes)
    if noted:
        return int(noted.group(1))
    condition = module.computations.get((loop.called("condition") or [""])[0], {})
    root = next((i for i in condition.values() if i.is_root), None)
    if root is None or root.opcode != "compare" or len(root.operands) != 2:
        return None
    direction = (re.search(r"direction=(\w+)", root.attributes) or ["", ""])[1]
    left, right = (condition.get(name) for name in root.operands)
    counter, limit = _counter(condition, left), _constant(condition, right)
    if counter is None:  # constant > counter
        counter, limit = _counter(condition, right), _constant(condition, left)
        direction = {"GT": "LT", "GE": "LE"}.get(direction, "")
    body = module.computations.get((loop.called("body") or [""])[0], {})
    start = _initial(module.computations[computation], loop, counter)
    step = _step(body, counter)
    if None in (counter, limit, start, step) or direction not in ("LT", "LE") or not step or step < 0:
        return None
    assert limit is not None and start is not None
    return max(0, -(-(limit - start + (direction == "LE")) // step))


def _behind_copies(computation: dict[str, Instruction], instruction: Instruction | None) -> Instruction | None:
    """Follow copies to their source."""
    while instruction is not None and instruction.opcode in ("copy", "bitcast") and instruction.operands:
        instruction = computation.get(instruction.operands[0])
    return instruction


def _counter(computation: dict[str, Instruction], instruction: Instruction | None) -> int | None:
    """Return the index of the loop-state element that an instruction reads, or None."""
    instruction = _behind_copies(computation, instruction)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    match = re.search(r"index=(\d+)", instruction.attributes)
    return int(match.group(1)) if match else None


def _constant(computation: dict[str, Instruction], instruction: Instruction | None) -> int | None:
    """Return the value of an integer constant."""
    instruction = _behind_copies(computation, instruction)
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.inside) if re.fullmatch(r"-?\d+", instruction.inside) else None


def _initial(computation: dict[str, Instruction], loop: Instruction, index: int | None) -> int | None:
    state = computation.get(loop.operands[0]) if loop.operands else None
    if state is None or state.opcode != "tuple" or index is None or index >= len(state.operands):
        return None
    return _constant(computation, computation.get(state.operands[index]))


def _step(body: dict[str, Instruction], index: int | None) -> int | None:
    """Return the increment of element `index` of the loop state in the body."""
    root = next((i for i in body.values() if i.is_root), None)
    if root is None or root.opcode != "tuple" or index is None or index >= len(root.operands):
        return None
    new = _behind_copies(body, body.get(root.operands[index]))
    if new is None or new.opcode != "add":
        return None
    sides = [body.get(name) for name in new.operands]
    if not any(_counter(body, side) == index for side in sides):
        return None
    return next((value for side in sides if (value := _constant(body, side)) is not None), None)
