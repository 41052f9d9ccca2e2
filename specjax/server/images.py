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

FORMATS = "PNG", "JPEG", "WEBP", "GIF", "BMP"
"""Formats that strangers may send. Others of PIL start programs, or are rarely used."""

MAX_PIXELS = 1 << 26
"""Largest number of pixels of all images of a prompt. A small file can hold a huge image of one color."""


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
        if len(pictures) > self.num_tiles:
            raise UsageError(self._too_many(len(pictures), "images"))
        ids, tiles = self.processor.chat(turns, open_images(pictures), **variables)
        self._check_sizes(tiles)
        return ids, self._inputs(ids, tiles)

    def _too_many(self, count: int, things: str) -> str:
        return (
            f"the prompt has {count} {things}, and this server takes at most {self.num_tiles} per prompt; send fewer "
            "or smaller images, or start it with a larger --image-tiles"
        )

    def _check_sizes(self, tiles: Tiles | None) -> None:
        """Check the images of a prompt. Raises: UsageError for too many or too large ones."""
        count = 0 if tiles is None else len(tiles.grids) if isinstance(tiles, PromptPatches) else len(tiles.pixels)
        if count > self.num_tiles:
            raise UsageError(self._too_many(count, "tiles of images"))
        if isinstance(tiles, PromptPatches) and self.num_patches is not None:
            largest = int(np.asarray(tiles.grids).prod(1).max())
            if largest > self.num_patches:
                raise UsageError(
                    f"an image has {largest} patches, and this server takes at most {self.num_patches}; send a smaller "
                    "one, or start it with a larger --image-patches"
                )

    def _inputs(self, ids: Sequence[int], tiles: Tiles | None) -> PyTree:
        inputs = images(self.target, [ids], [tiles], num_tiles=self.num_tiles, num_patches=self.num_patches)
        # In the memory of the host, because requests that wait must not fill the device.
        return jax.tree.map(lambda x: np.asarray(x)[0], inputs)


def open_images(pictures: Sequence[bytes]) -> list[Any]:
    """Return images of PIL whose pixels are not decoded yet.

    Raises: UsageError for bytes in none of FORMATS, or for more than MAX_PIXELS pixels in total.
    """
    import PIL.Image

    try:
        opened = [PIL.Image.open(io.BytesIO(picture), formats=FORMATS) for picture in pictures]
    except Exception:  # many kinds: no image, another format, a header that is cut short, too many pixels
        raise UsageError(f"a part image_url cannot be read as an image; send one of {', '.join(FORMATS)}") from None
    count = sum(image.width * image.height for image in opened)
    if count > MAX_PIXELS:
        raise UsageError(
            f"the images have {count} pixels, and this server takes at most {MAX_PIXELS} per prompt; send smaller ones"
        )
    return opened


def check_url(url: str) -> None:
    """Check that a URL is a data URL, because the server downloads nothing. Its data are not decoded."""
    head, comma, _ = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise UsageError("an image must be a data URL, such as data:image/png;base64,...; the server downloads nothing")


def decode_url(url: str) -> bytes:
    """Return the bytes of a data URL. Raises: UsageError for another URL, or for data that are not base64."""
    check_url(url)
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("the data URL of an image is not valid base64; encode the bytes of the file") from None
