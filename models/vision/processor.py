"""Prompts with images: transformers' image processor prepares the pixels, and placeholders stand for their vectors."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import QUOTED, first_line, quote, shorten
from specjax.models.vision import anyres
from specjax.models.vision.config import VisionLanguageConfig
from specjax.models.vision.grids import PromptPatches
from specjax.models.vision.memory import PromptImages, image_config
from specjax.types import Target

Tiles = PromptImages | PromptPatches
Picture = Any  # a path, an open binary file, or an image of PIL


class ImageProcessor(NamedTuple):
    """The image processor of a model, with its tokenizer."""

    config: VisionLanguageConfig
    tokenizer: Any
    process: Callable[..., Mapping[str, Any]]  # transformers' image processor

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], pictures: Sequence[Picture], /, **variables: Any
    ) -> tuple[list[int], Tiles | None]:
        """Return the ids of a conversation with a placeholder for each vector, and the tiles of its pictures.

        Args:
          messages: as for `Tokenizer.chat`, with an entry {"type": "image"} in the content of a message for each
            picture. A text is one message of the user, after all pictures.
          variables: other variables of the chat template.

        Raises: UsageError for a picture that cannot be read, a video, and another number of pictures in the messages. A
          model without a chat template reads texts only.
        """
        if not isinstance(messages, str):
            _check_parts(messages)
            return self.expand(self.tokenizer.chat(messages, **variables), pictures)
        if self.tokenizer.chat_template is None and not self.tokenizer.named_templates:
            return self.raw(messages, pictures)
        return self.expand(self.tokenizer.chat([picture_turn(messages, len(pictures))], **variables), pictures)

    def raw(self, text: str, pictures: Sequence[Picture]) -> tuple[list[int], Tiles | None]:
        """Return the ids and tiles of a text without a chat template.

        The text has the placeholder once for each picture. If it has none, the pictures come in a line before the text.
        """
        ids, name = self.tokenizer.encode(text), self.tokenizer.vocab[self.mark]
        if pictures and self.mark not in ids:
            ids = self.tokenizer.encode(f"{name * len(pictures)}\n{text}")
        return self.expand(ids, pictures)

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], Tiles | None]:
        """Replace the placeholder of each picture by those of all its vectors, and prepare the pictures."""
        count = list(ids).count(self.mark)
        if count != len(pictures):
            name = quote(self.tokenizer.vocab[self.mark])
            raise UsageError(
                f"the prompt has {count} times the placeholder {name} for {len(pictures)} images; use a chat template "
                "with images, or write the placeholder once per image in a prompt without the template"
            )
        tiles, grids = self._prepare([open_picture(picture) for picture in pictures])
        write: Callable[..., list[int]] = FORMS[self.config.model_type]
        parts = iter([write(self, *grid) for grid in grids])
        expanded = [i for token in ids for i in (next(parts) if token == self.mark else [token])]
        return (self._join_lines(expanded) if self.config.borders else expanded), tiles

    @property
    def mark(self) -> int:
        """Return the token that stands for a picture in a text."""
        return (*self.config.borders, self.config.image_token)[0]

    def _join_lines(self, ids: Sequence[int]) -> list[int]:
        """Encode line breaks again that follow each other, because a tokenizer has one token for several."""
        joined: list[int] = []
        for is_break, group in itertools.groupby(ids, key=lambda i: {*self.tokenizer.vocab[i]} == {"\n"}):
            run = list(group)
            text = "".join(self.tokenizer.vocab[i] for i in run)
            joined += self.tokenizer.encode(text, special=False) if is_break and len(run) > 1 else run
        return joined

    def _prepare(self, pictures: list[Any]) -> tuple[Tiles | None, list[tuple[int, int]]]:
        """Return the tiles of pictures, and the rows and columns of each.

        They count tiles, or patches for a tower that reads images of any size. They are 0 if a picture is one tile.
        """
        if not pictures:
            return None, []
        is_split = self.config.connector.shuffle > 0
        is_nested = self.config.any_resolution is not None
        try:
            with _quiet():
                if is_split:
                    result = self.process([pictures], return_tensors="np", return_row_col_info=True)
                else:
                    # The processor cuts an image into tiles only if it is alone in its list.
                    result = self.process([pictures] if is_nested else pictures, return_tensors="np")
        except Exception as error:  # many kinds: the settings of the processor are those of a file
            raise UsageError(
                f"the image processor of {self.config.name} fails ({shorten(first_line(error), QUOTED)}); use another "
                "picture, or check its preprocessor_config.json"
            ) from error
        if self.config.tower.merge and "image_grid_thw" not in result:
            raise UsageError(
                f"the image processor of {self.config.name} returns no image_grid_thw, so it is that of another model; "
                "check its preprocessor_config.json"
            )
        values = np.asarray(result["pixel_values"])
        if self.config.tower.merge:
            sizes = np.asarray(result["image_grid_thw"])
            return PromptPatches(values, sizes), [(int(rows), int(columns)) for _, rows, columns in sizes]
        if is_nested:
            tiles, counts = self._sample(values, pictures)
            return tiles, [(count, 1) for count in counts]
        if not is_split and len(values) != len(pictures):
            raise UsageError(
                f"the image processor of {self.config.name} cuts images into crops, which specjax does not support; "
                "set do_pan_and_scan to false in its preprocessor_config.json"
            )
        if not is_split:
            return PromptImages(values), [(0, 0)] * len(pictures)
        mask = None  # a processor that pads no image returns none
        if "pixel_attention_mask" in result:
            mask = np.asarray(result["pixel_attention_mask"])[0].astype(bool)
        grids = [(int(rows), int(columns)) for rows, columns in zip(result["rows"][0], result["cols"][0], strict=True)]
        return PromptImages(values[0], mask), grids

    def _sample(self, values: np.ndarray, pictures: Sequence[Any]) -> tuple[PromptImages, list[int]]:
        """Return the tiles of images of any resolution, and the number of vectors of each."""
        sizes, tower = self.config.any_resolution, self.config.tower
        assert sizes is not None
        grids: list[tuple[int, int] | None] = [None] * len(pictures)
        if len(pictures) == 1:
            grids = [anyres.best_grid(p.height, p.width, tower.image_size, sizes.grids) for p in pictures]
        counts = [1 if grid is None else 1 + grid[0] * grid[1] for grid in grids]
        if values.shape[:2] != (len(pictures), max(counts)):
            raise UsageError(
                f"the image processor of {self.config.name} returns {list(values.shape[:2])} tiles, and its "
                f"config.json needs {[len(pictures), max(counts)]}; download both files again"
            )
        samples = [
            anyres.sample_tile(tower.side, i * tower.side**2)
            if grid is None
            else anyres.sample_grid(picture.height, picture.width, grid, tower.side, 0, sizes)
            for i, (picture, grid) in enumerate(zip(pictures, grids, strict=True))
        ]
        pixels = values.reshape(-1, *values.shape[2:])
        return PromptImages(pixels, samples=anyres.join(samples)), [len(part.sources) for part in samples]

    def _token(self, name: str) -> int:
        """Return the id of a token. Raises: UsageError if the vocabulary lacks it."""
        try:
            return self.tokenizer.vocab.index(name)
        except ValueError:
            raise UsageError(
                f"the tokenizer of {self.config.name} lacks the token {quote(name)}, which surrounds images; download "
                "its files again"
            ) from None


def _check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that messages have no videos. Raises: UsageError if one has."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    if any(isinstance(part, Mapping) and part.get("type") == "video" for part in parts):
        raise UsageError("a message has a part of type video, which no model of specjax reads; pass frames as images")


def _write_tiles(processor: ImageProcessor, rows: int, columns: int) -> list[int]:
    """Return the ids of an image of Idefics3: its tiles in rows, and then the complete image."""
    config = processor.config
    border, vectors = processor._token("<fake_token_around_image>"), [config.image_token] * config.vectors_per_tile
    new_line = lambda count: processor.tokenizer.encode("\n" * count, special=False)
    ids: list[int] = []
    for row in range(rows):
        for column in range(columns):
            ids += [border, processor._token(f"<row_{row + 1}_col_{column + 1}>"), *vectors]
        ids += new_line(2 if row == rows - 1 else 1)
    return [*ids, border, processor._token("<global-img>"), *vectors, border]


def _write_image(processor: ImageProcessor, rows: int, columns: int) -> list[int]:
    """Return the ids of an image that is one tile: only placeholders."""
    return [processor.config.image_token] * processor.config.vectors_per_tile


def _write_vectors(processor: ImageProcessor, rows: int, columns: int) -> list[int]:
    """Return the ids of an image with this number of vectors: only placeholders."""
    return [processor.config.image_token] * (rows * columns)


def _write_bordered(processor: ImageProcessor, rows: int, columns: int) -> list[int]:
    """Return the ids of an image of Gemma 3: its vectors between two borders, in a paragraph of its own."""
    start, end = processor.config.borders
    paragraph = processor.tokenizer.encode("\n\n", special=False)
    return [*paragraph, start, *_write_image(processor, rows, columns), end, *paragraph]


def _write_grid(processor: ImageProcessor, rows: int, columns: int) -> list[int]:
    """Return the ids of an image of any size: a placeholder for each block of patches."""
    return [processor.config.image_token] * (rows * columns // processor.config.tower.merge**2)


FORMS = {
    "smolvlm": _write_tiles, "idefics3": _write_tiles, "llava": _write_image, "qwen2_vl": _write_grid,
    "gemma3": _write_bordered, "llava_onevision": _write_vectors, "qwen2_5_vl": _write_grid, "qwen3_vl": _write_grid,
}  # fmt: skip
"""The text of an image by `model_type`."""


def load_image_processor(folder: str | Path, target: Target, tokenizer: Any) -> ImageProcessor:
    """Load the image processor of a model from its folder. It needs the package transformers, and no torch.

    Raises: UsageError for a model without images, a folder without an image processor, and missing packages.
    """
    config = image_config(target)
    with optional_import("images", "images need"), _quiet():
        import PIL.Image  # noqa: F401
        from transformers import AutoImageProcessor
    path = Path(os.path.expanduser(folder))
    try:
        with _quiet():
            process = AutoImageProcessor.from_pretrained(str(path), backend="pil", local_files_only=True)
    except Exception as error:  # many kinds: no file, another class, other settings
        raise UsageError(
            f"{path} has no image processor that transformers loads ({shorten(first_line(error), QUOTED)}); download "
            "the complete folder of the model"
        ) from error
    return ImageProcessor(config, tokenizer, process)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing notes, such as one that torch is missing."""
    name = "TRANSFORMERS_VERBOSITY"
    value = os.environ.get(name)
    os.environ[name] = "error"
    try:
        yield
    finally:
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def picture_turn(text: str, count: int) -> dict[str, Any]:
    """Return a message of the user with `count` pictures before its text."""
    return {"role": "user", "content": [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]}


def open_picture(picture: Picture) -> Any:
    """Return a picture in red, green and blue, in the orientation of its camera. Raises: UsageError."""
    import PIL.Image
    import PIL.ImageOps

    try:
        opened = picture if isinstance(picture, PIL.Image.Image) else PIL.Image.open(picture)
        return PIL.ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # many kinds: no such file, no image, too many pixels, cut short
        name = quote(str(picture)) if isinstance(picture, str | os.PathLike) else "the image"
        raise UsageError(
            f"{name} cannot be read as an image ({shorten(first_line(error), QUOTED)}); give a file such as a PNG or "
            "JPEG"
        ) from None
