"""What a compiled TPU program says about itself: cycles, traffic, FLOPs, collectives. Pure functions of its HLO text.

The compiler schedules every fusion and leaves its own estimate in the text, `"estimated_cycles":"..."`. Those of the
computations that control flow reaches are summed here, a loop's body times its trip count. That is a schedule, not a
clock: it knows the units and the memory, not contention, and it charges about 2,000 cycles for each fusion however
small. `cost_analysis()["optimal_seconds"]` is never used: it does not multiply loop bodies by their trips, counts
prefetch copies twice, and came out negative for unrolled layers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "s4": 0.5, "u4": 0.5,
}  # fmt: skip
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
    "collective-broadcast",
)  # fmt: skip
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "copy-done", "slice-done", "while", "conditional", "call", "async-done", "async-update",
}  # fmt: skip
_VIEWS = {"bitcast", "copy", "convert", "reshape", "transpose"}  # within a fusion
_NO_FLOPS = _FREE | {
    "copy", "copy-start", "slice-start", "async-start", "fusion", "custom-call", "reshape", "transpose", "broadcast",
    "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather", "scatter", "iota", "convert",
    "bitcast-convert", "reverse", "rng-bit-generator", "reduce-precision", "select", "infeed", "outfeed", "send",
    "recv",
}  # fmt: skip


@dataclass(frozen=True)
class Array:
    """One array of a shape."""

    dtype: str
    dims: tuple[int, ...]
    in_vmem: bool  # the layout puts it into on-chip memory
    order: str = ""  # of the dimensions in memory, the fastest first, such as 1,0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * ITEM_BYTES.get(self.dtype, 0))


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str  # what stands between the parentheses
    attributes: str  # what follows them
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        return parse_shape(self.shape)

    @property
    def cycles(self) -> int:
        found = re.search(r'"estimated_cycles":"?(-?\d+)', self.attributes)
        return max(int(found.group(1)), 0) if found else 0

    def called(self, *keys: str) -> list[str]:
        """The computations named by attributes such as body=%x or branch_computations={%x, %y}."""
        names: list[str] = []
        for key in keys:
            found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
            names += re.findall(r"[\w.\-]+", found.group(1)) if found else []
        return names

    @property
    def source(self) -> str:
        """What the program calls it, such as jit(_step)/while/body/dot_general."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclass
class Module:
    """A parsed program."""

    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    entry: str = ""


@dataclass(frozen=True)
class Loop:
    """A while loop, where control flow reaches it."""

    instruction: Instruction
    depth: int  # loops around it
    path: tuple[str, ...]  # names of the loops around it
    index: int  # among the loops of its computation, in schedule order
    siblings: int  # how many those are
    trips: int | None  # None: it depends on the data


Trips = Callable[[Loop], float]
"""How often a loop runs whose trip count depends on the data."""


def parse(text: str) -> Module:
    """Computations by name, from the text of a compiled module."""
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
    return Instruction(head.group(2), line[at:end], call.group(1), operands, inside, line[close:], bool(head.group(1)))


def _close(line: str, at: int) -> int:
    """The index behind the parenthesis that closes the one at `at`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(line, at):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.end()
    return len(line)


@functools.lru_cache(maxsize=4096)
def parse_shape(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape, a tuple's in order."""
    found = re.findall(r"(\b[a-z]+\d*(?:e\dm\d\w*)?)\[([\d,<=]*)\](\{[^}]*\})?", shape)
    return tuple(
        Array(dtype, _numbers(dims), "S(1)" in layout, layout.strip("{}").split(":")[0])
        for dtype, dims, layout in found
        if dtype in ITEM_BYTES
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


# --- control flow -----------------------------------------------------------------------------------------------------


def walk(module: Module, trips: Trips = lambda loop: 1.0) -> Iterator[tuple[str, Instruction, float]]:
    """(computation, instruction, how often it runs) of everything that control flow reaches; fusions are one thing.

    Of a conditional's branches the dearest one in cycles runs: here, the widest verify pass.
    """
    yield from _walk(module, module.entry, 1.0, 0, (), trips)


def _walk(module: Module, name: str, times: float, depth: int, path: tuple[str, ...], trips: Trips):
    loops = loops_of(module, name, depth, path)
    for instruction in module.computations.get(name, {}).values():
        yield name, instruction, times
        if instruction.opcode == "while":
            loop = loops[instruction.name]
            count = trips(loop) if loop.trips is None else loop.trips
            for part in instruction.called("body", "condition"):
                yield from _walk(module, part, times * count, depth + 1, (*path, instruction.name), trips)
        elif instruction.opcode == "conditional":
            branches = instruction.called("branch_computations", "true_computation", "false_computation")
            if branches:
                chosen = max(branches, key=lambda branch: _cycles(module, branch, times, depth, path, trips))
                yield from _walk(module, chosen, times, depth, path, trips)
        elif instruction.opcode in ("call", "async-start"):
            for part in instruction.called("to_apply", "calls", "called_computations"):
                yield from _walk(module, part, times, depth, path, trips)


def _cycles(module, name, times, depth, path, trips) -> float:
    return sum(i.cycles * n for _, i, n in _walk(module, name, times, depth, path, trips))


def loops_of(module: Module, name: str, depth: int = 0, path: tuple[str, ...] = ()) -> dict[str, Loop]:
    """The while loops of one computation, by name, in schedule order."""
    found = [i for i in module.computations.get(name, {}).values() if i.opcode == "while"]
    counts = [trip_count(module, name, i) for i in found]
    dynamic = [i.name for i, count in zip(found, counts, strict=True) if count is None]
    place = {name: index for index, name in enumerate(dynamic)}
    return {
        i.name: Loop(i, depth, path, place.get(i.name, -1), len(dynamic), count)
        for i, count in zip(found, counts, strict=True)
    }


def dynamic_loops(module: Module) -> list[Loop]:
    """Loops whose trip count depends on the data, outer ones first, each computation once."""
    found: list[Loop] = []

    def note(loop: Loop) -> float:
        if loop.instruction.name not in {other.instruction.name for other in found}:
            found.append(loop)
        return 1.0

    for _ in walk(module, note):
        pass
    return found


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """How often a loop runs: what the compiler notes, or a counter compared with a constant; None: neither."""
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
    """What an instruction copies, or itself."""
    while instruction is not None and instruction.opcode in ("copy", "bitcast") and instruction.operands:
        instruction = computation.get(instruction.operands[0])
    return instruction


def _counter(computation: dict[str, Instruction], instruction: Instruction | None) -> int | None:
    """Which element of the loop's state is read; None: it is no such read."""
    instruction = _behind_copies(computation, instruction)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    found = re.search(r"index=(\d+)", instruction.attributes)
    return int(found.group(1)) if found else None


def _constant(computation: dict[str, Instruction], instruction: Instruction | None) -> int | None:
    """The value of an integer."""
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
    """By how much the body raises element `index` of its state."""
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


# --- sums -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Calls of a Pallas kernel, which the compiler gives no cycles; its author's own estimate, if there is one."""

    calls: float
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Collective:
    """All runs of one kind of collective."""

    kind: str
    count: float  # trips included
    bytes: float  # of their results, all runs together
    wire_bytes: float  # that a device sends, on a ring
    group: int  # devices that take part


@dataclass(frozen=True)
class Totals:
    """Sums over a program, per device, trip counts included."""

    cycles: float
    flops: float
    hbm_bytes: float
    instructions: float  # scheduled ones, that do something
    kernels: Kernel
    collectives: tuple[Collective, ...]


def totals(module: Module, trips: Trips = lambda loop: 1.0) -> Totals:
    """Cycles, FLOPs, bytes to and from HBM, and collectives."""
    cycles = flops = moved = instructions = 0.0
    kernels = Kernel(0)
    collectives: dict[tuple[str, int], list[float]] = {}
    for name, instruction, times in walk(module, trips):
        computation = module.computations[name]
        cycles += times * instruction.cycles
        flops += times * flops_of(module, computation, instruction)
        moved += times * traffic(module, computation, instruction)
        instructions += times * (instruction.opcode not in _FREE)
        kernel = _kernel(instruction)
        if kernel is not None:
            kernels = Kernel(
                kernels.calls + times, kernels.flops + times * kernel.flops, kernels.bytes + times * kernel.bytes
            )
            flops += times * kernel.flops
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            size, wire, group = _sent(computation, instruction, kind)
            sums = collectives.setdefault((kind, group), [0.0, 0.0, 0.0])
            for place, value in enumerate((1, size, wire)):
                sums[place] += times * value
    found = tuple(
        Collective(kind, count, size, wire, group) for (kind, group), (count, size, wire) in sorted(collectives.items())
    )
    return Totals(cycles, flops, moved, instructions, kernels, found)


def _kernel(instruction: Instruction) -> Kernel | None:
    if 'custom_call_target="tpu_custom_call"' not in instruction.attributes:
        return None
    read = lambda key: re.search(rf'\\?"{key}\\?":\\?"?(\d+)', instruction.attributes)
    flops, moved = read("flops"), read("bytes_accessed")
    return Kernel(1, float(flops.group(1)) if flops else 0.0, float(moved.group(1)) if moved else 0.0)


def _sent(computation, instruction: Instruction, kind: str) -> tuple[float, float, int]:
    """(bytes of the result, bytes that a device sends on a ring, devices of a group)."""
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
    """From replica_groups={{0,1},{2,3}}, [4,2]<=[8] (groups, devices of each) or mesh['x'=2,'y'=4] {'y'}."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        chosen = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named.group(2))  # a whole axis, or a part of one
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in chosen)
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return len(listed.group(1).split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes)
    return int(counted.group(2)) if counted else 1


def traffic(module: Module, computation: dict[str, Instruction], instruction: Instruction) -> float:
    """Bytes that one run of an instruction moves to or from HBM; what lies in on-chip memory is free.

    A fusion that slices an operand reads the slice only, and one that updates a slice in place writes that only.
    """
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0.0
    kernel = _kernel(instruction)
    if kernel is not None and kernel.bytes:  # it reads what it needs of its operands
        return kernel.bytes
    operands = [computation[name] for name in instruction.operands if name in computation]
    outer = [[a for a in operand.arrays if not a.in_vmem] for operand in operands]
    written = sum(a.bytes for a in instruction.arrays if not a.in_vmem)
    if instruction.opcode == "fusion":
        inner = module.computations.get((instruction.called("calls") or [""])[0], {})
        read = sum(_read(module, inner, index, arrays) for index, arrays in enumerate(outer))
        return read + _written(inner, instruction)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * written
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * sum(a.bytes for a in operands[1].arrays) if len(operands) > 1 else 0.0
    if instruction.opcode in ("copy-start", "slice-start", "async-start"):  # (destination, source, context)
        first = instruction.arrays[0].bytes if instruction.arrays else 0
        kept = [a for a in instruction.arrays[:1] if not a.in_vmem]
        return float(first + sum(a.bytes for a in kept))
    return float(sum(a.bytes for arrays in outer for a in arrays) + written)


def _read(module: Module, inner: dict[str, Instruction], index: int, outer: list[Array]) -> float:
    """What a fusion reads of its operand `index`, whose arrays in HBM are `outer`."""
    whole = float(sum(a.bytes for a in outer))
    if not whole:
        return 0.0
    parameter = next((i for i in inner.values() if i.opcode == "parameter" and i.inside == str(index)), None)
    if parameter is None:
        return whole
    total, names = 0.0, {parameter.name}
    for user in inner.values():
        if not names & set(user.operands):
            continue
        if user.opcode in _VIEWS or "output_to_operand_aliasing" in user.attributes:
            if user.is_root:
                return whole
            names.add(user.name)  # computed where it is read
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] in names:
            total += sum(a.bytes for a in user.arrays)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] in names:
            pass  # updated in place
        elif user.opcode == "fusion":
            nested = module.computations.get((user.called("calls") or [""])[0], {})
            total += sum(_read(module, nested, i, outer) for i, name in enumerate(user.operands) if name in names)
        else:
            return whole
    return min(total, whole)


def _written(inner: dict[str, Instruction], fusion: Instruction) -> float:
    root = next((i for i in inner.values() if i.is_root), None)
    if root is None:
        return float(sum(a.bytes for a in fusion.arrays if not a.in_vmem))
    parts = [inner.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for part, array in zip(parts, fusion.arrays, strict=False):
        while part is not None and part.opcode == "bitcast" and part.operands:
            part = inner.get(part.operands[0])
        if array.in_vmem:
            continue
        update = part is not None and part.opcode == "dynamic-update-slice" and inner.get(part.operands[1])
        total += sum(a.bytes for a in update.arrays) if update else array.bytes
    return total


def flops_of(module: Module, computation: dict[str, Instruction], instruction: Instruction) -> float:
    """Multiplications and additions of one run, as XLA counts them: 2 per product of a dot, 1 per element otherwise."""
    if instruction.opcode == "fusion":
        inner = module.computations.get((instruction.called("calls") or [""])[0], {})
        return sum(flops_of(module, inner, part) for part in inner.values())
    out = float(sum(a.elements for a in instruction.arrays))
    if instruction.opcode in ("dot", "convolution"):
        operands = [computation[name].arrays for name in instruction.operands if name in computation]
        if len(operands) < 2 or not operands[0] or not operands[1]:
            return 0.0
        products = _dot_products if instruction.opcode == "dot" else _convolution_products
        return 2.0 * products(out, operands[0][0], operands[1][0], instruction)
    if instruction.opcode in ("reduce", "reduce-window"):
        first = computation.get(instruction.operands[0]) if instruction.operands else None
        return float(first.arrays[0].elements) if first is not None and first.arrays else 0.0
    if instruction.opcode in _NO_FLOPS or instruction.opcode.split("-start")[0] in COLLECTIVES:
        return 0.0
    return out if any(a.dtype in ("f32", "bf16", "f16", "f64") for a in instruction.arrays) else 0.0


def _dot_products(out: float, left: Array, right: Array, instruction: Instruction) -> float:
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    chosen = [int(n) for n in dims.group(1).split(",") if n] if dims else []
    return out * math.prod(left.dims[d] for d in chosen)


def _convolution_products(out: float, left: Array, right: Array, instruction: Instruction) -> float:
    """Products of a convolution. The TPU compiler writes dots as such, batch dimensions as dilated windows."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    kernel, result, data = labels.group(2), labels.group(3), labels.group(1)
    inputs = right.dims[kernel.index("i")]
    spatial = [c for c in kernel if c.isdigit()]
    window = _window(instruction.attributes, len(spatial))
    pairs, positions = 1.0, 1.0
    for axis, label in enumerate(spatial):
        size_out = instruction.arrays[0].dims[result.index(label)]
        pairs *= _valid_pairs(left.dims[data.index(label)], size_out, *(values[axis] for values in window))
        positions *= size_out
    return out / positions * pairs * inputs


def _window(attributes: str, axes: int) -> tuple[list[int], ...]:
    """size, stride, padding in front, dilation of the data, dilation of the window, per spatial axis."""
    text = (re.search(r"window=\{([^}]*)\}", attributes) or ["", ""])[1]

    def read(key: str, default: int) -> list[int]:
        found = re.search(rf"\b{key}=([\d\-_x]+)", text)
        values = [int(part.split("_")[0]) for part in found.group(1).split("x")] if found else []
        return values + [default] * (axes - len(values))

    return read("size", 1), read("stride", 1), read("pad", 0), read("lhs_dilate", 1), read("rhs_dilate", 1)


def _valid_pairs(size_in, size_out, size, stride, pad, dilate_in, dilate_window) -> float:
    """(output position, window position) pairs that meet an element of the data, not padding or a hole."""
    place = np.arange(size_out)[:, None] * stride + np.arange(size) * dilate_window - pad
    return float(np.sum((place >= 0) & (place < (size_in - 1) * dilate_in + 1) & (place % dilate_in == 0)))


# --- findings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something that makes a program slow, or that its author should know."""

    kind: str
    count: float  # runs
    bytes: float
    sentence: str


def findings(
    module: Module, trips: Trips = lambda loop: 1.0, *, vocab_size: int = 0, large: frozenset[tuple] = frozenset()
) -> list[Finding]:
    """Sorts of the vocabulary, calls of the host, and copies of arrays whose (dtype, dims) are in `large`.

    A move into on-chip memory or out of it is no copy: the compiler keeps there what it uses most (of Gemma 3 270M half
    of the cache, through all of a prefill). A change of the order in memory is one wherever it goes.

    Args: large: the cache and the parameters as one device holds them; only these are worth naming.
    """
    sorts = host = 0.0
    copies: dict[tuple, list[float]] = {}
    for name, instruction, times in walk(module, trips):
        for computation, part in _parts(module, name, instruction):
            if part.opcode == "sort" and vocab_size:
                sizes = [a for o in part.operands if o in computation for a in computation[o].arrays]
                sorts += times * any(vocab_size in a.dims for a in sizes)
            if _is_host_call(part):
                host += times
        array = instruction.arrays[0] if instruction.arrays else None
        if array is None or (array.dtype, tuple(sorted(array.dims))) not in large:
            continue
        if _is_copy(module.computations[name], instruction, array):
            sums = copies.setdefault((array.dtype, array.dims), [0.0, 0.0])
            sums[0] += times
            sums[1] += times * array.bytes
    found = []
    if sorts:
        found.append(Finding("vocabulary_sort", sorts, 0.0, f"sorts the vocabulary of {vocab_size} {sorts:g} times"))
    if host:
        found.append(Finding("host_call", host, 0.0, f"calls the host {host:g} times"))
    for (dtype, dims), (count, moved) in copies.items():
        shape = f"{dtype}[{','.join(map(str, dims))}]"
        sentence = f"copies {shape} {count:g} times, {moved / 1e6:.0f} MB together"
        found.append(Finding("copy", count, moved, sentence))
    return found


def _is_copy(computation: dict[str, Instruction], instruction: Instruction, array: Array) -> bool:
    if instruction.opcode not in ("copy", "copy-start", "transpose") or not instruction.operands:
        return False
    operand = computation.get(instruction.operands[0])
    source = operand.arrays[0] if operand is not None and operand.arrays else array
    moved = array.in_vmem or source.in_vmem
    return not moved or source.order != array.order or instruction.opcode == "transpose"


def _parts(module: Module, name: str, instruction: Instruction):
    """An instruction, or all of a fusion's, each with its computation."""
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
