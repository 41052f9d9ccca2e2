"""Parsing of compressions of prompts from text, such as `specpc:512` or `speckv:1024`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.catalog.lazy import import_name
from specjax.catalog.methods import METHODS, of_kind
from specjax.catalog.options import read_call
from specjax.errors import UsageError
from specjax.types import Target


class Compression(NamedTuple):
    """A method that compresses prompts or their caches, and its options."""

    text: str  # the text that was parsed
    method: str
    options: Mapping[str, Any]
    draft: str | None = None  # the source of the model that selects the tokens; None: the caller has one

    @property
    def is_of_cache(self) -> bool:
        """Return True for a method that compresses the target's cache, and False for one that shortens prompts."""
        return "target" in METHODS[self.method].arguments

    def compile(self, draft: Target, prompts: Sequence[Sequence[int]]) -> None:
        """Compile the program that shortens these prompts."""
        import_name(f"{METHODS[self.method].module}:compile_for")(draft, prompts, **self.options)

    def shorten(self, draft: Target, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the shortened prompts. `draft` selects the tokens."""
        result: list[list[int]] = METHODS[self.method].load()(draft, prompts, **self.options)
        return result

    def compress_cache(self, target: Target, draft: Target | None, max_new_tokens: int) -> Target:
        """Return the target with compressed caches. `draft` looks ahead."""
        result: Target = METHODS[self.method].load()(target, draft, max_new_tokens, **self.options)
        return result

    @property
    def capacity(self) -> int:
        """Return the cached prompt tokens that a compression of caches keeps."""
        capacity: int = METHODS[self.method].load_check()(**self.options).capacity
        return capacity


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
