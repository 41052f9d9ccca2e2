"""Over how many tokens a program multiplies with the output head: the largest array of logits that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from specjax.planning.hlo.control_flow import Taken, Trips, always, walk
from specjax.planning.hlo.parsing import Instruction, Module

PRODUCTS = ("dot", "convolution")


class Logits(NamedTuple):
    """The result of a product with the head, on one device."""

    dtype: str
    shape: tuple[int, ...]
    rows: int  # tokens that it has logits of
    bytes: int


def largest_logits(
    module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always, *, vocab_sizes: frozenset[int]
) -> Logits | None:
    """Of all products of what runs that have a dimension of one of these sizes; None: there is none.

    vocab_sizes: of the vocabulary, and of the part of it that a device holds.
    """
    found: Logits | None = None
    for _, instruction, times in walk(module, trips, taken):
        for part in _products(module, instruction) if times else ():
            for array in part.arrays:
                held = vocab_sizes & set(array.dims)
                rows = array.elements // max(held) if held else 0
                if rows > (found.rows if found else 0):
                    found = Logits(array.dtype, array.dims, rows, array.bytes)
    return found


def _products(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction, or those within its fusion, that multiply matrices."""
    parts = [instruction]
    if instruction.opcode == "fusion":
        parts = list(module.computations.get((instruction.called("calls") or [""])[0], {}).values())
    for part in parts:
        if part.opcode in PRODUCTS:
            yield part
        elif part is not instruction and part.opcode == "fusion":
            yield from _products(module, part)
