"""Floating-point operations of an instruction."""

from __future__ import annotations

import math
import re

import numpy as np

from specjax.planning.hlo.parsing import COLLECTIVES, FREE, Array, Instruction, Module

_NO_FLOPS = FREE | {
    "copy", "copy-start", "slice-start", "async-start", "fusion", "custom-call", "reshape", "transpose", "broadcast",
    "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather", "scatter", "iota", "convert",
    "bitcast-convert", "reverse", "rng-bit-generator", "reduce-precision", "select", "infeed", "outfeed", "send",
    "recv",
}  # fmt: skip


def flops_of(module: Module, computation: dict[str, Instruction], instruction: Instruction) -> float:
    """Count the operations of one execution as XLA does: 2 per product of a dot, 1 per element otherwise."""
    if instruction.opcode == "fusion":
        inner = module.computations.get((instruction.called("calls") or [""])[0], {})
        return sum(flops_of(module, inner, part) for part in inner.values())
    if is_library_product(instruction):
        return _library_flops(computation, instruction)
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
    if (
        instruction.opcode in _NO_FLOPS
        or instruction.opcode.endswith("-done")
        or instruction.opcode.split("-start")[0] in COLLECTIVES
    ):
        return 0.0
    return out if any(a.dtype in ("f32", "bf16", "f16", "f64") for a in instruction.arrays) else 0.0


def float32_flops_of(module: Module, computation: dict[str, Instruction], instruction: Instruction) -> float:
    """Count those of `flops_of` in products of float32 numbers with the precision "highest"."""
    if instruction.opcode == "fusion":
        inner = module.computations.get((instruction.called("calls") or [""])[0], {})
        return sum(float32_flops_of(module, inner, part) for part in inner.values())
    if instruction.opcode not in ("dot", "convolution") and not is_library_product(instruction):
        return 0.0
    operands = [computation[name].arrays for name in instruction.operands[:2] if name in computation]
    is_full = re.search(r"operand_precision[^}\]]*highest", instruction.attributes, re.IGNORECASE)
    if not is_full or not all(arrays and arrays[0].dtype == "f32" for arrays in operands):
        return 0.0
    return flops_of(module, computation, instruction)


def is_library_product(instruction: Instruction) -> bool:
    """Return True for a matrix product that a GPU library computes. Its second result is the library's workspace."""
    return bool(re.search(r'custom_call_target="__cu(blas|tlass)', instruction.attributes))


def _library_flops(computation: dict[str, Instruction], instruction: Instruction) -> float:
    """Count the operations of a library's product from the dimensions that it sums over."""
    dims = re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', instruction.attributes)
    left = computation.get(instruction.operands[0]) if instruction.operands else None
    if dims is None or left is None or not left.arrays:
        return 0.0
    return (
        2.0
        * instruction.arrays[0].elements
        * math.prod(left.arrays[0].dims[int(d)] for d in re.findall(r"\d+", dims[1]))
    )


def _dot_products(out: float, left: Array, right: Array, instruction: Instruction) -> float:
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    contracted = [int(n) for n in dims.group(1).split(",") if n] if dims else []
    return out * math.prod(left.dims[d] for d in contracted)


def _convolution_products(out: float, left: Array, right: Array, instruction: Instruction) -> float:
    """Count the products of a convolution.

    The TPU compiler represents dots as convolutions, and batch dimensions as dilated windows.
    """
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
    """Return size, stride, low padding, data dilation and window dilation, each per spatial axis."""
    text = (re.search(r"window=\{([^}]*)\}", attributes) or ["", ""])[1]

    def read(key: str, default: int) -> list[int]:
        match = re.search(rf"\b{key}=([\d\-_x]+)", text)
        values = [int(part.split("_")[0]) for part in match.group(1).split("x")] if match else []
        return values + [default] * (axes - len(values))

    return read("size", 1), read("stride", 1), read("pad", 0), read("lhs_dilate", 1), read("rhs_dilate", 1)


def _valid_pairs(size_in, size_out, size, stride, pad, dilate_in, dilate_window) -> float:
    """Count the (output position, window position) pairs on an element of the data, not on padding or a gap."""
    place = np.arange(size_out)[:, None] * stride + np.arange(size) * dilate_window - pad
    return float(np.sum((place >= 0) & (place < (size_in - 1) * dilate_in + 1) & (place % dilate_in == 0)))
