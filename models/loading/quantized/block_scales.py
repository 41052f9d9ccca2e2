"""Scales of rectangular blocks of a matrix [O, I]: of the whole matrix, of outputs, of groups of inputs or of tiles."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from specjax.models.loading.quantized.stored_matrix import SCALES, StoredMatrix, as_scales
from specjax.models.loading.tensors.tensors import TensorLocation, read_stored


class BlockScales(NamedTuple):
    """The scales of one matrix, with one number per block of `block` outputs and inputs.

    The last block of each axis can be smaller.
    """

    tensor: TensorLocation  # with the shape of the grid of blocks
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale, a divisor of all inputs.

        It is smaller than a block if blocks do not divide the inputs.
        """
        return math.gcd(self.block[1], self.shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return the scales float32[stop - start, I / group] of some outputs."""
        first = start // self.block[0]
        stored = as_scales(read_stored(self.tensor, first, -(-stop // self.block[0])))
        by_output = stored[np.arange(start, stop) // self.block[0] - first]
        return by_output[:, np.arange(self.shape[1] // self.group) * self.group // self.block[1]]


def block_scales(
    matrix: StoredMatrix, part: str, shape: tuple[int, int], block: tuple[int, int], kinds: Collection[str] = SCALES
) -> BlockScales:
    """Return the scales that a part of the file has. An axis of one block may be absent.

    Raises: UsageError for another shape, NaN or infinity.
    """
    block = min(block[0], shape[0]), min(block[1], shape[1])
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    shapes = [grid, *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]
    tensor = matrix.scales(part, shapes, kinds)
    return BlockScales(tensor._replace(shape=grid), shape, block)
