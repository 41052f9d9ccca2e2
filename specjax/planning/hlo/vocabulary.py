"""The largest array of logits in a program, from its products with the output head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from specjax.planning.hlo.control_flow import Taken, Trips, always, walk
from specjax.planning.hlo.parsing import Instruction, Module

PRODUCTS = ("dot", "convolution")


class Logits(NamedTuple):
    """The result of a product with the output head, on one device."""

    dtype: str
    shape: tuple[int, ...]
    rows: int  # number of tokens with logits
    bytes: int


def largest_logits(
    module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always, *, vocab_sizes: frozenset[int]
) -> Logits | None:
    """Return the product with the most tokens among those with a dimension in `vocab_sizes`, or None.

    Args:
      vocab_sizes: sizes of the vocabulary and of its shard on one device.
    """
    largest: Logits | None = None
    for _, instruction, times in walk(module, trips, taken):
        for part in _products(module, instruction) if times else ():
            for array in part.arrays:
                vocab_dims = vocab_sizes & set(array.dims)
                rows = array.elements // max(vocab_dims) if vocab_dims else 0
                if rows > (largest.rows if largest else 0):
                    largest = Logits(array.dtype, array.dims, rows, array.bytes)
    return largest


def _products(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the matrix products: the instruction itself, or instructions inside its fusion."""
    parts = [instruction]
    if instruction.opcode == "fusion":
        parts = list(module.computations.get((instruction.called("calls") or [""])[0], {}).values())
    for part in parts:
        if part.opcode in PRODUCTS or (part.opcode == "reduce" and part.source.endswith("dot_general")):
            yield part  # a GPU's product with one row may be a sum of elements
        elif part is not instruction and part.opcode == "fusion":
            yield from _products(module, part)
