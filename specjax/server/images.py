"""Images in chats: data URLs become the inputs of a request, all in one shape."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.models.vision.grids import PromptPatches
from specjax.models.vision.memory import images
from specjax.models.vision.processor import ImageProcessor, Tiles
from specjax.types import PyTree, Target


class ImageReader(NamedTuple):
    """The image processor of a served model, and the largest images of a prompt."""

    target: Target
    processor: ImageProcessor
    num_tiles: int  # of all images of a prompt; images, for models that read images of any size
    num_patches: int | None = None  # of each image, for such models

    @property
    def blank(self) -> PyTree:
        """Return the inputs of a prompt without images."""
        return self._inputs([], None)

    def read(
        self, turns: Sequence[Mapping[str, Any]], pictures: Sequence[bytes], variables: Mapping[str, Any]
    ) -> tuple[list[int], PyTree]:
        """Return the ids of a chat with images, and the inputs of its request.

        Raises: UsageError for bytes that are no image, or for more or larger images than the server takes.
        """
        ids, tiles = self.processor.chat(turns, [io.BytesIO(picture) for picture in pictures], **variables)
        self._check_sizes(tiles)
        return ids, self._inputs(ids, tiles)

    def _check_sizes(self, tiles: Tiles | None) -> None:
        """Check the images of a prompt. Raises: UsageError for too many or too large ones."""
        is_grid = isinstance(tiles, PromptPatches)
        count = 0 if tiles is None else len(tiles.grids) if isinstance(tiles, PromptPatches) else len(tiles.pixels)
        if count > self.num_tiles:
            raise UsageError(
                f"the images have {count} {'grids' if is_grid else 'tiles'}, and this server takes at most "
                f"{self.num_tiles} per prompt; send fewer or smaller images, or start it with a larger --image-tiles"
            )
        if isinstance(tiles, PromptPatches) and self.num_patches is not None:
            largest = int(np.asarray(tiles.grids).prod(1).max())
            if largest > self.num_patches:
                raise UsageError(
                    f"an image has {largest} patches, and this server takes at most {self.num_patches}; send a smaller "
                    "one, or start it with a larger --image-patches"
                )

    def _inputs(self, ids: Sequence[int], tiles: Tiles | None) -> PyTree:
        inputs = images(self.target, [ids], [tiles], num_tiles=self.num_tiles, num_patches=self.num_patches)
        return jax.tree.map(lambda x: x[0], inputs)


def decode_url(url: str) -> bytes:
    """Return the bytes of a data URL. Raises: ValueError for other URLs, because the server downloads nothing."""
    head, comma, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise ValueError("an image must be a data URL, such as data:image/png;base64,...; the server downloads nothing")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the data URL of an image is not valid base64") from None
