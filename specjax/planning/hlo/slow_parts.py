"""Causes of slow programs: sorts of the vocabulary, host calls, copies and slices of caches and parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from specjax.planning.hlo.control_flow import Taken, Trips, always, walk
from specjax.planning.hlo.parsing import Array, Instruction, Module


@dataclass(frozen=True)
class Finding:
    """A possible cause of slowness."""

    kind: str
    count: float  # executions
    bytes: float
    sentence: str


def findings(
    module: Module,
    trips: Trips = lambda loop: 1.0,
    taken: Taken = always,
    *,
    vocab_size: int = 0,
    large: frozenset[tuple] = frozenset(),
) -> list[Finding]:
    """Find sorts of the vocabulary, host calls, and copies and slices of arrays whose (dtype, dims) are in `large`.

    A slice is an array in memory that has one dimension less, such as the weights of one layer out of a stack.

    A move into or out of on-chip memory is not counted as a copy, because the compiler stores frequently used arrays
    there. (For Gemma 3 270M it stores half of the cache during a complete prefill.) A change of the memory order is
    always counted.

    Args:
      large: the cache and the parameters as one device stores them. Smaller copies are not reported.
    """
    sorts = host = 0.0
    copies: dict[tuple, list[float]] = {}
    complete, parts = _shapes(large)
    for name, instruction, times in walk(module, trips, taken):
        for computation, part in _parts(module, name, instruction):
            if part.opcode == "sort" and vocab_size:
                sizes = [a for o in part.operands if o in computation for a in computation[o].arrays]
                sorts += times * any(vocab_size in a.dims for a in sizes)
            if _is_host_call(part):
                host += times
        array = instruction.arrays[0] if instruction.arrays else None
        if array is None:
            continue
        is_whole = (array.dtype, tuple(sorted(array.dims))) in large
        kind = "copy" if is_whole and _is_copy(module.computations[name], instruction, array) else None
        if kind is None and not array.in_vmem and _moves_only(module, instruction):
            kind = "copy" if _key(array.dims) in complete else "slice" if _key(array.dims) in parts else None
        if kind is not None:
            sums = copies.setdefault((kind, array.dtype, array.dims), [0.0, 0.0])
            sums[0] += times
            sums[1] += times * array.bytes
    results = []
    if sorts:
        results.append(Finding("vocabulary_sort", sorts, 0.0, f"sorts the vocabulary of {vocab_size} {sorts:g} times"))
    if host:
        results.append(Finding("host_call", host, 0.0, f"calls the host {host:g} times"))
    for (kind, dtype, dims), (count, moved) in copies.items():
        shape = f"{dtype}[{','.join(map(str, dims))}]"
        verb = {"copy": "copies", "slice": "slices"}[kind]
        results.append(Finding(kind, count, moved, f"{verb} {shape} {count:g} times, {moved / 1e6:.0f} MB in total"))
    return results


def _key(dims: Iterable[int]) -> tuple[int, ...]:
    """Return the dimensions above 1, sorted, because layouts and bitcasts reorder them."""
    return tuple(sorted(n for n in dims if n > 1))


def _shapes(large: frozenset[tuple]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Return the dimensions of large arrays, and those without one dimension that still are large."""
    complete = {_key(dims) for _, dims in large}
    parts = {dims[:i] + dims[i + 1 :] for dims in complete for i in range(len(dims))}
    return complete, {dims for dims in parts if len(dims) > 1 and math.prod(dims) >= LARGE_ELEMENTS} - complete


LARGE_ELEMENTS = 1 << 19
"""Smallest slice that is reported, in elements: a megabyte of bfloat16."""
_MOVING = {
    "parameter", "constant", "bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice", "convert", "tuple",
    "get-tuple-element",
}  # fmt: skip


def _moves_only(module: Module, instruction: Instruction) -> bool:
    """Return True for a slice, or a fusion that only moves or converts its operands. Indices may be computed."""
    if instruction.opcode in ("slice", "dynamic-slice"):
        return True
    if instruction.opcode != "fusion":
        return False
    inner = module.computations.get((instruction.called("calls") or [""])[0], {}).values()
    return all(part.opcode in _MOVING or all(a.elements == 1 for a in part.arrays) for part in inner)


def _is_copy(computation: dict[str, Instruction], instruction: Instruction, array: Array) -> bool:
    if instruction.opcode not in ("copy", "copy-start", "transpose") or not instruction.operands:
        return False
    operand = computation.get(instruction.operands[0])
    source = operand.arrays[0] if operand is not None and operand.arrays else array
    moved = array.in_vmem or source.in_vmem
    return not moved or source.order != array.order or instruction.opcode == "transpose"


def _parts(module: Module, name: str, instruction: Instruction):
    """Yield an instruction, or all instructions of a fusion, each with its computation."""
    yield module.computations[name], instruction
    if instruction.opcode == "fusion":
        inner = module.computations.get((instruction.called("calls") or [""])[0], {})
        for part in inner.values():
            yield inner, part


def _is_host_call(instruction: Instruction) -> bool:
    if instruction.opcode in ("infeed", "outfeed"):
        return True
    if instruction.opcode in ("send", "recv"):
        return "is_host_transfer=true" in instruction.attributes
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return bool(target and re.search(r"callback|Host", target.group(1)))
