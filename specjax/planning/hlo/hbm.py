"""Bytes that an instruction moves to and from HBM."""

from __future__ import annotations

import re

from specjax.costs.roofline import Kernel
from specjax.planning.hlo.flops import is_library_product
from specjax.planning.hlo.parsing import FREE, Array, Instruction, Module

_VIEWS = {"bitcast", "copy", "convert", "reshape", "transpose"}  # within a fusion


def traffic(module: Module, computation: dict[str, Instruction], instruction: Instruction) -> float:
    """Return the bytes that one execution moves to or from HBM. On-chip memory is free.

    A fusion that slices an operand reads only the slice, and one that updates a slice in place writes only the slice.
    """
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0.0
    kernel = kernel_of(instruction)
    if kernel is not None and kernel.bytes:  # a kernel may read only parts of its operands
        return kernel.bytes
    operands = [computation[name] for name in instruction.operands if name in computation]
    outer = [[a for a in operand.arrays if not a.in_vmem] for operand in operands]
    results = instruction.arrays[:1] if is_library_product(instruction) else instruction.arrays  # without workspace
    written = sum(a.bytes for a in results if not a.in_vmem)
    if instruction.opcode == "fusion":
        inner = module.computations.get((instruction.called("calls") or [""])[0], {})
        read = sum(_read(module, inner, index, arrays) for index, arrays in enumerate(outer))
        return read + _written(inner, instruction)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * written
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * sum(a.bytes for a in operands[1].arrays) if len(operands) > 1 else 0.0
    if instruction.opcode == "slice-start":  # ((source), destination, context); only the slice of the source is read
        part = instruction.arrays[1]
        return float(part.bytes * (not instruction.arrays[0].in_vmem) + part.bytes * (not part.in_vmem))
    if instruction.opcode in ("copy-start", "async-start"):  # (destination, source, context)
        first = instruction.arrays[0].bytes if instruction.arrays else 0
        off_chip = [a for a in instruction.arrays[:1] if not a.in_vmem]
        return float(first + sum(a.bytes for a in off_chip))
    return float(sum(a.bytes for arrays in outer for a in arrays) + written)


def _read(module: Module, inner: dict[str, Instruction], index: int, outer: list[Array]) -> float:
    """Return the bytes that a fusion reads of operand `index`, whose arrays in HBM are `outer`."""
    operand_bytes = float(sum(a.bytes for a in outer))
    if not operand_bytes:
        return 0.0
    parameter = next((i for i in inner.values() if i.opcode == "parameter" and i.inside == str(index)), None)
    if parameter is None:
        return operand_bytes
    total, names = 0.0, {parameter.name}
    for user in inner.values():
        if not names & set(user.operands):
            continue
        if user.opcode in _VIEWS or "output_to_operand_aliasing" in user.attributes:
            if user.is_root:
                return operand_bytes
            names.add(user.name)  # computed at its use, without a copy
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] in names:
            total += sum(a.bytes for a in user.arrays)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] in names:
            pass  # updated in place
        elif user.opcode == "fusion":
            nested = module.computations.get((user.called("calls") or [""])[0], {})
            total += sum(_read(module, nested, i, outer) for i, name in enumerate(user.operands) if name in names)
        else:
            return operand_bytes
    return min(total, operand_bytes)


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


def kernel_of(instruction: Instruction) -> Kernel | None:
    if 'custom_call_target="tpu_custom_call"' not in instruction.attributes:
        return None
    read = lambda key: re.search(rf'\\?"{key}\\?":\\?"?(\d+)', instruction.attributes)
    flops, moved = read("flops"), read("bytes_accessed")
    return Kernel(1, float(flops.group(1)) if flops else 0.0, float(moved.group(1)) if moved else 0.0)
