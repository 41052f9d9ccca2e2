"""Parser of the text of a compiled program into computations and instructions."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "s4": 0.5, "u4": 0.5,
}  # fmt: skip
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
    "collective-broadcast",
)  # fmt: skip
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "copy-done", "slice-done", "while", "conditional", "call", "async-done", "async-update",
}  # fmt: skip
"""Opcodes that do no work themselves."""


@dataclass(frozen=True)
class Array:
    """Dtype, dimensions and layout of an array."""

    dtype: str
    dims: tuple[int, ...]
    in_vmem: bool  # True if the layout is in on-chip memory
    order: str = ""  # order of the dimensions in memory, the fastest first, such as 1,0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * ITEM_BYTES.get(self.dtype, 0))


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str  # text between the parentheses
    attributes: str  # text after the parentheses
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        return parse_shape(self.shape)

    @property
    def cycles(self) -> int:
        match = re.search(r'"estimated_cycles":"?(-?\d+)', self.attributes)
        return max(int(match.group(1)), 0) if match else 0

    def called(self, *keys: str) -> list[str]:
        """Return the computations named by attributes such as body=%x or branch_computations={%x, %y}."""
        names: list[str] = []
        for key in keys:
            match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
            names += re.findall(r"[\w.\-]+", match.group(1)) if match else []
        return names

    @property
    def source(self) -> str:
        """Return the name of the operation in the program, such as jit(_step)/while/body/dot_general."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


@dataclass
class Module:
    """A parsed program."""

    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    entry: str = ""


def parse(text: str) -> Module:
    """Parse the text of a compiled module into computations by name."""
    module = Module()
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = module.computations.setdefault(head.group(2), {})
                module.entry = head.group(2) if head.group(1) else module.entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    return module


def _parse_instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    at = head.end()
    end = _close(line, at) if line[at] == "(" else line.index(" ", at)
    call = re.compile(r"\s*([\w\-]+)\(").match(line, end)
    if call is None:
        return None
    close = _close(line, call.end() - 1)
    inside = line[call.end() : close - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    shape, opcode = line[at:end], call.group(1)
    if opcode == "fusion-start":  # ((operands), results, context) of a fusion that runs beside others
        first = _close(shape, 1)
        shape, opcode = shape[first + 2 : shape.rindex(",")], "fusion"
    return Instruction(head.group(2), shape, opcode, operands, inside, line[close:], bool(head.group(1)))


def _close(line: str, at: int) -> int:
    """Return the index after the parenthesis that closes the one at `at`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, at):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)


@functools.lru_cache(maxsize=4096)
def parse_shape(shape: str) -> tuple[Array, ...]:
    """Return the arrays of a shape, or of a tuple of shapes, in order."""
    match = re.findall(r"(\b[a-z]+\d*(?:e\dm\d\w*)?)\[([\d,<=]*)\](\{[^}]*\})?", shape)
    return tuple(
        Array(dtype, _numbers(dims), "S(1)" in layout, layout.strip("{}").split(":")[0])
        for dtype, dims, layout in match
        if dtype in ITEM_BYTES
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
