"""Images of any size as grids of patches, and their positions on three axes (M-RoPE, arXiv 2409.12191)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.models.vision.config import VisionLanguageConfig
from specjax.numerics.validation import check_integer
from specjax.types import Array

PATCHES = 256
"""Images are padded to a multiple of it, and of the patches in a block. So images of similar sizes share a program."""

UNUSED = np.iinfo(np.int32).max
"""The place of a vector that no prompt has."""


class GridImages(NamedTuple):
    """The images of a batch of prompts as patches, and the places and rotary positions of their vectors."""

    patches: Array  # float32[B, N, S, F], in blocks of merged neighbours, then unspecified values
    grids: Array  # int32[B, N, 2], rows and columns of patches; 0 for no image
    places: Array  # int32[B, P], the position of each vector in the prompt, or UNUSED
    rotary: Array  # int32[B, P, 3], its positions in time, height and width
    ends: Array  # int32[B, N], the position after each image, or UNUSED
    shifts: Array  # int32[B, N], added to the rotary position of all text after an image


class PromptPatches(NamedTuple):
    """The patches of all images of one prompt, as transformers' image processor returns them."""

    patches: np.ndarray  # float32[patches of all images, F]
    grids: np.ndarray  # int[n, 3], frames, rows and columns of patches of each image


def grid_images(
    config: VisionLanguageConfig, prompts: Sequence[Sequence[int]], entries: Sequence[PromptPatches | None], count: int,
    num_patches: int | None = None,
) -> GridImages:  # fmt: skip
    """Return the images of prompts with placeholders, padded to `count` images per row.

    num_patches: the least number of patches per image of the result; None: those of the largest image.

    Raises: UsageError for patches of another size, grids that are not made of blocks, videos, and prompts with another
      number of placeholders than vectors.
    """
    tower = config.tower
    features, merge = tower.channels * tower.frames * tower.patch_size**2, tower.merge
    rows = [PromptPatches(np.zeros((0, features)), np.zeros((0, 3), int)) if x is None else x for x in entries]
    sizes = [np.asarray(entry.grids, int).reshape(-1, 3) for entry in rows]
    for row, (entry, grids) in enumerate(zip(rows, sizes, strict=True)):
        has_blocks = (grids[:, 0] == 1).all() and (grids[:, 1:] >= 1).all() and not (grids[:, 1:] % merge).any()
        if np.shape(entry.patches) != (int(grids.prod(1).sum()), features) or not has_blocks:
            raise UsageError(
                f"the patches of prompt {row} have the shape {list(np.shape(entry.patches))} for the grids "
                f"{grids.tolist()}, which must be one frame each with {features} numbers per patch, and rows and "
                f"columns that are multiples of {merge}"
            )
    largest = max([1, *(int(grids.prod(1).max(initial=0)) for grids in sizes)])
    check_integer("num_patches", num_patches, largest)
    unit = math.lcm(PATCHES, merge**2)
    num_patches = -(-(num_patches or largest) // unit) * unit
    per_image = num_patches // merge**2
    shape = len(rows), count
    patches = np.zeros((*shape, num_patches, features), np.float32)
    grid_sizes, shifts = np.zeros((*shape, 2), np.int32), np.zeros(shape, np.int32)
    ends, places = np.full(shape, UNUSED, np.int32), np.full((*shape, per_image), UNUSED, np.int32)
    rotary = np.zeros((*shape, per_image, 3), np.int32)
    for row, (prompt, entry, grids) in enumerate(zip(prompts, rows, sizes, strict=True)):
        at = np.flatnonzero(np.asarray(prompt) == config.image_token)
        blocks = grids[:, 1:] // merge
        if len(at) != blocks.prod(1).sum():
            raise UsageError(
                f"prompt {row} has {len(at)} placeholders (token {config.image_token}) and images of "
                f"{blocks.prod(1).tolist()} vectors; encode it with the image processor of the model"
            )
        first, start, total = 0, 0, 0
        for i, (height, width) in enumerate(blocks):
            number = height * width
            image = at[start : start + number]
            patches[row, i, : number * merge**2] = entry.patches[first : first + number * merge**2]
            grid_sizes[row, i], places[row, i, :number] = grids[i, 1:], image
            base = image[0] + total
            inside = np.indices((height, width)).reshape(2, -1).T
            rotary[row, i, :number] = base + np.concatenate([np.zeros((number, 1), int), inside], 1)
            ends[row, i], shifts[row, i] = image[-1] + 1, max(height, width) - number
            total, start, first = total + shifts[row, i], start + number, first + number * merge**2
    flat = lambda x: jnp.asarray(x.reshape(len(rows), count * per_image, *x.shape[3:]))
    return GridImages(
        jnp.asarray(patches), jnp.asarray(grid_sizes), flat(places), flat(rotary), jnp.asarray(ends),
        jnp.asarray(shifts),
    )  # fmt: skip


def patch_places(height: Array, width: Array, count: int, merge: int) -> tuple[Array, Array]:
    """Return the row and the column int32[count] of each patch of an image with these rows and columns of patches.

    The blocks of merge x merge patches are in rows, and so are the patches of a block.
    """
    index = jnp.arange(count)
    block, inside = index // merge**2, index % merge**2
    per_row = jnp.maximum(width // merge, 1)
    return block // per_row * merge + inside // merge, block % per_row * merge + inside % merge
