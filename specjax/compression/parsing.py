"""Parsing of compressions of prompts from text, such as `specpc:512`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.catalog.methods import METHODS, of_kind
from specjax.catalog.options import read_call
from specjax.errors import UsageError
from specjax.types import Target


class Compression(NamedTuple):
    """A method that compresses prompts, and its options."""

    text: str  # the text that was parsed
    method: str
    options: Mapping[str, Any]
    draft: str | None = None  # the source of the model that selects the tokens; None: the caller has one

    def __call__(self, draft: Target, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the compressed prompts. `draft` selects the tokens."""
        result: list[list[int]] = METHODS[self.method].load()(draft, prompts, **self.options)
        return result


def parse_compression(text: str) -> Compression:
    """Return the compression of a text such as `specpc:512` or `specpc:512,window=32`.

    Raises: UsageError for an unknown method or an invalid option.
    """
    name = text.partition(":")[0]
    rows = of_kind("compression")
    if name not in rows:
        raise UsageError(f'"{name}" is not a method that compresses prompts; choose one of {", ".join(rows)}')
    options = read_call(text, rows[name].settable)
    draft = options.pop("draft", None)
    rows[name].load_check()(**options)
    return Compression(text, name, options, draft)
