"""Images in the prompts of a plan, as shapes."""

from __future__ import annotations

from typing import Any

import jax

from specjax.catalog.defaults import IMAGE_PATCHES
from specjax.errors import UsageError, require
from specjax.models import images
from specjax.models.vision.config import VisionLanguageConfig
from specjax.types import PyTree, Target


def check_images(config: Any, tiles: int, patches: int, context: int) -> None:
    """Check the images of a prompt with `context` tokens. Raises: UsageError that names the option at fault."""
    require(tiles >= 0, f"--image-tiles must be at least 0, not {tiles}")
    require(patches >= 1, f"--image-patches must be at least 1, not {patches}")
    if tiles == 0:
        require(patches == IMAGE_PATCHES, f"--image-patches {patches} needs images; add --image-tiles, or leave it out")
        return
    if not isinstance(config, VisionLanguageConfig):
        raise UsageError(f"--image-tiles {tiles}: {config.name} reads no images; leave it out")
    merge = config.tower.merge
    require(
        merge > 0 or patches == IMAGE_PATCHES,
        f"--image-patches {patches}: {config.name} reads tiles of one size; leave it out",
    )
    vectors = tiles * (patches // merge**2 if merge else config.vectors_per_tile)
    require(
        vectors < context,
        f"--image-tiles {tiles} are {vectors} vectors, which leave no text in --context {context}; raise --context",
    )


def image_shapes(target: Target, batch: int, tiles: int, patches: int) -> PyTree:
    """Return the shapes of the `inputs` of a batch of prompts with images; None without tiles."""
    if tiles == 0:
        return None
    any_size = target.model.config.tower.merge > 0
    row = images(target, [[0]], [None], num_tiles=tiles, num_patches=patches if any_size else None)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), row)
