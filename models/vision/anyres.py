"""Images of any resolution as tiles of one size (LLaVA-OneVision, arXiv 2408.03326).

An image is read twice: as one tile, and as a grid of tiles. The grid keeps the aspect of the image, so its borders are
padding, and their vectors are left out. If too many are left, they are resized. A learned vector ends each row.

The host computes which patches each vector of a prompt is made of. So the device only gathers and adds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.models.vision.config import AnyResolution
from specjax.types import Array

CORNERS = 4  # patches around a vector of a resized grid
ROW_END = -1  # the source of a vector that ends a row
RESIZED = 1.1
"""Grids are resized if their sides are longer than the largest ones by this factor."""


class PatchSamples(NamedTuple):
    """The vectors of images as sums of the vectors of patches."""

    sources: Array | np.ndarray  # int32[..., P, CORNERS], the patches among all tiles, or ROW_END
    weights: Array | np.ndarray  # float32[..., P, CORNERS]

    def apply(self, vectors: Array, row_end: Array) -> Array:
        """Return the vectors [B, P, D] from those of all patches [B, S, D] and the one [D] that ends a row."""

        def corner(i: int) -> Array:
            sources = self.sources[..., i, None]
            taken = jnp.where(sources == ROW_END, row_end, take_along(vectors, jnp.maximum(sources, 0), 1))
            return taken.astype(jnp.float32) * self.weights[..., i, None]

        return sum(map(corner, range(1, CORNERS)), corner(0)).astype(vectors.dtype)


def join(samples: Sequence[PatchSamples]) -> PatchSamples:
    """Return the samples of several images, whose sources count the same tiles."""
    empty = PatchSamples(np.zeros((0, CORNERS), np.int32), np.zeros((0, CORNERS), np.float32))
    return PatchSamples(*(np.concatenate(parts) for parts in zip(empty, *samples, strict=True)))


def best_grid(height: int, width: int, size: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the grid of tiles of `size` pixels that shows most pixels of an image, and of these the smallest one."""

    def rate(grid: tuple[int, int]) -> tuple[int, int]:
        rows, columns = grid[0] * size, grid[1] * size
        scale = min(columns / width, rows / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - rows * columns

    return max(grids, key=rate)


def sample_tile(side: int, first: int) -> PatchSamples:
    """Return the vectors of an image that is one tile with `side` x `side` patches, and one row end.

    first: the number of the first patch among all tiles.
    """
    return join([_alone(first + np.arange(side**2)), _alone(np.array([ROW_END]))])


def sample_grid(
    height: int, width: int, grid: tuple[int, int], side: int, first: int, sizes: AnyResolution
) -> PatchSamples:
    """Return the vectors of an image: those of its first tile, and then the rows of its grid.

    Args:
      height, width: the pixels of the image before it is resized.
      grid: rows and columns of its tiles. side: the patches in a row of a tile. first: as in `sample_tile`.
    """
    rows, columns = (np.arange(count * side) for count in grid)
    if width / height > len(columns) / len(rows):
        rows = _without_padding(rows, height * (len(columns) / width))
    else:
        columns = _without_padding(columns, width * (len(rows) / height))
    ratio = math.sqrt(len(rows) * len(columns) / (sizes.max_tiles * side**2))
    row_parts, column_parts = (
        _resize(line, int(len(line) // ratio) if ratio > RESIZED else len(line)) for line in (rows, columns)
    )
    parts = [
        (_patches(row, column, grid[1], side) + first + side**2, row_weight[:, None] * column_weight)
        for row, row_weight in row_parts
        for column, column_weight in column_parts
    ]
    sources, weights = (np.stack(values, -1) for values in zip(*parts, strict=True))
    ends = _alone(np.full(len(sources), ROW_END))
    sources, weights = (
        np.concatenate([inside, end[:, None]], 1).reshape(-1, CORNERS)
        for inside, end in ((sources, ends.sources), (weights, ends.weights))
    )
    inner = PatchSamples(sources.astype(np.int32), weights.astype(np.float32))
    return join([_alone(first + np.arange(side**2)), inner])


def _alone(sources: np.ndarray) -> PatchSamples:
    """Return vectors that are one source each."""
    weights = np.zeros((len(sources), CORNERS), np.float32)
    weights[:, 0] = 1
    return PatchSamples(np.repeat(sources[:, None], CORNERS, 1).astype(np.int32), weights)


def _without_padding(line: np.ndarray, length: float) -> np.ndarray:
    """Return the middle of a line of patches, of which an image covers `length`."""
    padding = (len(line) - int(round(length, 7))) // 2
    return line[padding : len(line) - padding]


def _resize(line: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the two nearest patches of a line for each of `count` points, and their weights.

    The line of an image that is much longer than high may be empty.
    """
    at = np.maximum((np.arange(count) + 0.5) * (len(line) / max(count, 1)) - 0.5, 0)
    lower = at.astype(int)
    fraction = at - lower
    return [(line[lower], 1 - fraction), (line[np.minimum(lower + 1, len(line) - 1)], fraction)]


def _patches(rows: np.ndarray, columns: np.ndarray, tiles_per_row: int, side: int) -> np.ndarray:
    """Return the number of each patch int[rows, columns] among the tiles of a grid."""
    (top, row), (left, column) = divmod(rows[:, None], side), divmod(columns[None], side)
    return ((top * tiles_per_row + left) * side + row) * side + column
