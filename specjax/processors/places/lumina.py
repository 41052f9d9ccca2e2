"""The layout of an image of Lumina-mGPT (Liu et al. 2024, arXiv 2408.02657), a fine-tuned Chameleon.

Layout: a start token and two tokens for height and width, then rows of codes with a newline token each, then an end
token. A side is measured in units of 32 pixels, and each unit has two rows or two columns of codes.
Rule: `by_place` allows codes at the places of codes and forces the newlines and the end.
Guidance: the unconditional prompt is `LuminaLayout.start`, so the unconditional rows contain the image only. Guidance
applies from the first code on. The released code forces the same tokens after guidance and before top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.processors.places.by_place import by_place
from specjax.types import Processor

UNIT = 32
"""Pixels of a unit of height or width."""
PER_UNIT = 2
"""Rows or columns of codes of a unit."""


class LuminaTokens(NamedTuple):
    """Token ids of Lumina-mGPT's vocabulary. The defaults are those of the published models."""

    start: int = 8197
    size: int = 8804  # the token of a side of n units has the id size + n
    newline: int = 8803
    end: int = 8196
    codes: tuple[int, int] = (4, 8196)  # the range of codes, END excluded


class LuminaLayout(NamedTuple):
    """The tokens that stand before an image, and the rule of those that follow."""

    start: tuple[int, int, int]  # the last tokens of each prompt, and the unconditional prompt
    processor: Processor
    num_tokens: int  # tokens of the answer, with the newlines and the end


def lumina_layout(height: int, width: int, tokens: LuminaTokens | None = None) -> LuminaLayout:
    """Return the layout of an image of this many pixels.

    Args:
      tokens: the ids of another vocabulary. None: those of the published models.

    Raises: UsageError for sides that are no multiples of 32.
    """
    for name, side in (("height", height), ("width", width)):
        is_number = isinstance(side, int | float | np.number) and UNIT <= side < np.inf
        if not is_number or side % UNIT:
            raise UsageError(f"{name} must be a multiple of {UNIT} pixels, not {quote(side)}")
    ids = LuminaTokens() if tokens is None else tokens
    units = int(height) // UNIT, int(width) // UNIT
    rows, columns = (PER_UNIT * side for side in units)
    row = [0] * columns + [1]
    places = row * rows + [2]
    processor = by_place([range(*ids.codes), [ids.newline], [ids.end]], places)
    return LuminaLayout((ids.start, ids.size + units[0], ids.size + units[1]), processor, len(places))
