"""The largest array of logits in a program: the tokens that it multiplies with the output head."""

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
    rows: int  # tokens that it has logits of
    bytes: int


def largest_logits(
    module: Module, trips: Trips = lambda loop: 1.0, taken: Taken = always, *, vocab_sizes: frozenset[int]
) -> Logits | None:
    """Find the product with a dimension of one of these sizes that covers most tokens, or None.

    Args:
      vocab_sizes: size of the vocabulary, and of its shard on one device.
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
    """Yield the instruction, or those inside its fusion, that multiply matrices."""
    parts = [instruction]
    if instruction.opcode == "fusion":
        parts = list(module.computations.get((instruction.called("calls") or [""])[0], {}).values())
    for part in parts:
        if part.opcode in PRODUCTS:
            yield part
        elif part is not instruction and part.opcode == "fusion":
            yield from _products(module, part)
