"""Images as inputs of a model, and their vectors, which the cache contains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models.vision.anyres import CORNERS, PatchSamples
from specjax.models.vision.config import VisionLanguageConfig
from specjax.models.vision.grids import UNUSED, GridImages, PromptPatches, grid_images
from specjax.numerics.global_arrays import gather
from specjax.numerics.validation import check_integer
from specjax.types import Array, PyTree, Target

UNIT = 4
"""Rows with more than one tile have a multiple of it, so that images of similar sizes share a program."""


class Images(NamedTuple):
    """The images of a batch of prompts as tiles of one size, and the places of their vectors."""

    pixels: Array  # float32[B, N, C, H, W]
    patches: Array  # bool[B, N, H / p, W / p], the patches that are not padding; none in tiles without an image
    places: Array  # int32[B, P], the position of each vector in the prompt, or UNUSED
    samples: PatchSamples | None = None  # [B, P, ..], what each vector is made of; None: one patch, in order


class PromptImages(NamedTuple):
    """The tiles of all images of one prompt, in the order of their placeholders."""

    pixels: np.ndarray  # float32[n, C, H, W]
    mask: np.ndarray | None = None  # bool[n, H, W], the pixels that are not padding; None: all
    samples: PatchSamples | None = None  # [P, ..], for images of any resolution


def images(
    target: Target,
    prompts: Sequence[Sequence[int]],
    tiles: Sequence[PromptImages | PromptPatches | np.ndarray | None],
    *,
    num_tiles: int | None = None,
    num_patches: int | None = None,
) -> Images | GridImages:
    """Return the `inputs` of a model that reads images, for prompts with placeholders.

    Args:
      prompts: token lists, in which each vector of an image has a placeholder.
      tiles: the tiles of each prompt, or their pixels; None for a prompt without images. Models that read images of
        any size take `PromptPatches`, and each image counts as a tile.
      num_tiles: the tiles per row of the result, such as those of the largest request of a server. None: the most that
        a prompt has, rounded up to 1 or a multiple of UNIT.
      num_patches: for models that read images of any size, the patches of each image of the result, such as those of
        the largest image of a server. They are rounded up to a multiple of `grids.PATCHES`. None: those of the largest
        image.

    Raises: UsageError for a model without images, tiles of another size, and prompts with another number of
      placeholders than vectors.
    """
    config = image_config(target)
    size, patch = config.tower.image_size, config.tower.patch_size
    shape = config.tower.channels, size, size
    if len(prompts) != len(tiles):
        raise UsageError(f"there are tiles for {len(tiles)} prompts, but {len(prompts)} prompts; give one entry each")
    if config.tower.merge:
        entries = [_as_patches(entry, row) for row, entry in enumerate(tiles)]
        return grid_images(
            config, prompts, entries, _count(num_tiles, [len(x.grids) for x in entries if x is not None]), num_patches
        )
    if num_patches is not None:
        raise UsageError(f"{config.name} reads tiles of one size; leave num_patches out, or set num_tiles")
    rows = [_as_tiles(entry, shape, row) for row, entry in enumerate(tiles)]
    count = _count(num_tiles, [len(row.pixels) for row in rows])
    pixels = np.zeros((len(rows), count, *shape), np.float32)
    side = config.tower.side
    patches = np.zeros((len(rows), count, side, side), bool)
    places = np.full((len(rows), count * config.places_per_tile), UNUSED, np.int32)
    samples = None
    if config.any_resolution is not None:
        samples = PatchSamples(*(np.zeros((*places.shape, CORNERS), kind) for kind in (np.int32, np.float32)))
    for row, (prompt, entry) in enumerate(zip(prompts, rows, strict=True)):
        at = np.flatnonzero(np.asarray(prompt) == config.image_token)
        number = len(entry.pixels)
        if entry.samples is not None and samples is not None:
            expected, vectors = len(entry.samples.sources), f"images of {len(entry.samples.sources)} vectors in all"
        else:
            expected = number * config.vectors_per_tile
            vectors = f"{number} tiles of {config.vectors_per_tile} vectors each"
        if len(at) != expected or (number and (entry.samples is None) != (samples is None)):
            raise UsageError(
                f"prompt {row} has {len(at)} placeholders (token {config.image_token}) and {vectors}; encode it with "
                "the image processor of the model"
            )
        if entry.samples is not None and samples is not None:
            samples.sources[row, : len(at)], samples.weights[row, : len(at)] = entry.samples
        if config.sees_ahead and not _are_runs(at, config.vectors_per_tile):
            raise UsageError(
                f"the placeholders of an image in prompt {row} have other tokens between them, but its vectors see "
                "each other; encode the prompt with the image processor of the model"
            )
        pixels[row, :number] = entry.pixels
        mask = np.ones((number, size, size), bool) if entry.mask is None else np.asarray(entry.mask, bool)
        inside = mask[:, : side * patch, : side * patch].reshape(number, side, patch, side, patch)
        patches[row, :number] = inside.any((2, 4))
        places[row, : len(at)] = at
    return Images(*jax.tree.map(jnp.asarray, (pixels, patches, places, samples)))


def _are_runs(places: np.ndarray, size: int) -> bool:
    """Return True if each image has `size` consecutive places."""
    by_image = places.reshape(-1, size)
    return bool((np.diff(by_image, axis=1) == 1).all())


def _count(num_tiles: int | None, numbers: Sequence[int]) -> int:
    """Return the tiles of each row for prompts with these numbers of tiles. Raises: UsageError if there are too few."""
    largest = max([1, *numbers])
    check_integer("num_tiles", num_tiles, largest)
    return num_tiles or (1 if largest == 1 else -(-largest // UNIT) * UNIT)


def _as_patches(entry: PromptImages | PromptPatches | np.ndarray | None, row: int) -> PromptPatches | None:
    """Return the patches of a prompt. Raises: UsageError for tiles of one size."""
    if entry is None or isinstance(entry, PromptPatches):
        return entry
    raise UsageError(f"the tiles of prompt {row} must be PromptPatches, for a model that reads images of any size")


def check_fit(config: VisionLanguageConfig, inputs: PyTree) -> None:
    """Check that the inputs of a model are None or images for its tower, or for that of its target.

    Raises: UsageError for others.
    """
    if inputs is None:
        return
    if not isinstance(inputs, GridImages if config.tower.merge else Images):
        raise UsageError(
            f"inputs of {config.name} must be images; pass inputs=specjax.models.images(...), or leave inputs out"
        )
    if isinstance(inputs, GridImages):
        _check_patches(config, inputs)
        return
    tower, num_tiles = config.tower, inputs.pixels.shape[1]
    shape, places = (tower.channels, tower.image_size, tower.image_size), num_tiles * config.places_per_tile
    if inputs.pixels.shape[2:] != shape or inputs.places.shape[1] != places:
        raise UsageError(
            f"{config.name} reads images of {' x '.join(map(str, shape))} numbers as {config.places_per_tile} vectors "
            f"each, and these have {' x '.join(map(str, inputs.pixels.shape[2:]))} and "
            f"{inputs.places.shape[1] // num_tiles}; choose a draft model with the image tower of the target"
        )


def _check_patches(config: VisionLanguageConfig, inputs: GridImages) -> None:
    """Check that patches have the size and the blocks that a tower reads. Raises: UsageError."""
    tower, (_, images_per_row, num_patches, numbers) = config.tower, inputs.patches.shape
    expected = tower.channels * tower.frames * tower.patch_size**2
    if numbers != expected or inputs.places.shape[1] != images_per_row * (num_patches // tower.merge**2):
        raise UsageError(
            f"{config.name} reads patches of {expected} numbers in blocks of {tower.merge} x {tower.merge}, and these "
            f"have {numbers} numbers and {images_per_row * num_patches // inputs.places.shape[1]} patches per block; "
            "choose a draft model with the image tower of the target"
        )


def check_places(config: VisionLanguageConfig, inputs: Images | GridImages, tokens: Any, lengths: Any) -> None:
    """Check that prompts int[B, P] of `lengths` int[B] tokens have their placeholders where the vectors have places.

    Other prompts than those that the images were made for would be read without some of the vectors.

    Raises: UsageError for other prompts.
    """
    check_fit(config, inputs)
    has_images = inputs.grids if isinstance(inputs, GridImages) else inputs.patches
    tokens, lengths, places, has_images = gather((tokens, lengths, inputs.places, has_images))
    for row, (prompt, length, numbers) in enumerate(zip(tokens, lengths, places, strict=True)):
        expected = numbers[numbers != UNUSED] if has_images[row].any() else numbers[:0]
        placeholders = np.flatnonzero(prompt[:length] == config.image_token)
        if not np.array_equal(placeholders, expected):
            raise UsageError(
                f"prompt {row} has {len(placeholders)} placeholders (token {config.image_token}), and its images have "
                f"{len(expected)} vectors for other places; pass the prompts that specjax.models.images was called with"
            )


def image_config(target: Target) -> VisionLanguageConfig:
    """Return the config of a model that reads images. Raises: UsageError for other models."""
    config = target.model.config
    if not isinstance(config, VisionLanguageConfig):
        raise UsageError(
            f"the model {target.model.name} reads no images; leave them out, or choose a model such as SmolVLM"
        )
    return config


def _as_tiles(
    entry: PromptImages | PromptPatches | np.ndarray | None, shape: tuple[int, ...], row: int
) -> PromptImages:
    """Return the tiles of a prompt. Raises: UsageError if they do not have this shape."""
    if isinstance(entry, PromptPatches):
        raise UsageError(f"the tiles of prompt {row} are PromptPatches, but the model reads tiles of one size")
    if entry is None:
        return PromptImages(np.zeros((0, *shape), np.float32))
    tiles = entry if isinstance(entry, PromptImages) else PromptImages(np.asarray(entry))
    pixels = np.asarray(tiles.pixels, np.float32)
    mask_shape = pixels.shape[:1] + pixels.shape[2:]
    if pixels.ndim != 4 or pixels.shape[1:] != shape or (tiles.mask is not None and tiles.mask.shape != mask_shape):
        raise UsageError(
            f"the tiles of prompt {row} have the shape {list(np.shape(tiles.pixels))}, which must be "
            f"[tiles, {', '.join(map(str, shape))}] with one mask each"
        )
    return PromptImages(pixels, tiles.mask, tiles.samples)


class ImagePositions(NamedTuple):
    """Rotary positions on three axes. They never index the cache."""

    rotary: Array  # int32[B, P, 3], of each vector: time, height and width
    ends: Array  # int32[B, N], the position after each image
    shifts: Array  # int32[B, N], added to the rotary position of all text after an image


class ImageMemory(NamedTuple):
    """The vectors of the images, and their places in the prompts."""

    vectors: Array  # [B, P, D]
    places: Array  # int32[B, P]
    axes: ImagePositions | None = None  # None: rotary positions are places
    deep: Array | None = None  # [B, L, P, D], added to the stream after the first L layers (DeepStack); None: nothing

    def find(self, positions: Array) -> tuple[Array, Array]:
        """Return the index int32[B, T] of the vector at `positions` int32[B, T], and bool[B, T]: there is one."""
        matches = self.places[:, None] == positions[..., None]
        return jnp.argmax(matches, -1), jnp.any(matches, -1)

    def put(self, x: Array, positions: Array) -> Array:
        """Replace embeddings x [B, T, D] at `positions` int32[B, T] by the vectors that have these places."""
        index, has_vector = self.find(positions)
        return jnp.where(has_vector[..., None], take_along(self.vectors, index[..., None], 1).astype(x.dtype), x)

    def additions(self, positions: Array) -> list[Array]:
        """Return the vectors [B, T, D] to add after each of the first layers at `positions` int32[B, T]."""
        if self.deep is None:
            return []
        index, has_vector = self.find(positions)
        at_places = take_along(self.deep, index[:, None, :, None], 2)
        return list(jnp.where(has_vector[:, None, :, None], at_places, 0).swapaxes(0, 1))

    def rotary(self, positions: Array, frequency_axes: np.ndarray) -> Array:
        """Return the rotary position int32[B, T, r / 2] of each frequency at `positions` int32[B, T].

        Text has the same position on all axes.
        """
        if self.axes is None:
            return positions
        index, has_vector = self.find(positions)
        is_before = self.axes.ends[:, None] <= positions[..., None]
        text = positions + jnp.sum(jnp.where(is_before, self.axes.shifts[:, None], 0), -1)
        of_vectors = take_along(self.axes.rotary, index[..., None], 1)
        by_axis = jnp.where(has_vector[..., None], of_vectors, text[..., None])
        return by_axis[..., frequency_axes]
