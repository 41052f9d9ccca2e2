"""Options as the catalogue declares them, and their values from text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.loading.decision_heads import read_acceptance, read_judge
from specjax.trees import parse as tree
from specjax.trees import parse_paths, stops

REQUIRED: Any = ...
"""The default of an option that has none."""


class Option(NamedTuple):
    """What a factory can be told besides its models."""

    name: str
    type: Callable[[str], Any] | tuple[str, ...]  # reads a text; or the texts that there are
    default: Any  # None: the factory decides
    help: str

    @property
    def form(self) -> str:
        """How a value is written."""
        return "|".join(self.type) if isinstance(self.type, tuple) else _FORMS.get(self.type, "NAME")

    def parse(self, text: str, name: str | None = None) -> Any:
        """The value of a text. Raises: UsageError about `name`; default: the option's own."""
        name = name or self.name
        if isinstance(self.type, tuple):
            if text not in self.type:
                raise UsageError(f'{name} must be one of {", ".join(self.type)}, not "{text}"')
            return text
        try:
            value = self.type(text)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        except ValueError:
            raise UsageError(f'{name} must be {_WORDS[self.type]}, not "{text}"') from None
        if isinstance(value, float) and math.isnan(value):  # which no comparison of a factory would find
            raise UsageError(f'{name} must be {_WORDS[self.type]}, not "{text}"')
        if any(isinstance(n, int) and abs(n) >= 1 << 31 for n in (value if isinstance(value, tuple) else (value,))):
            raise UsageError(f"{name} must be {_WORDS[self.type]} below 2**31, not {text}")
        return value


def yes_or_no(text: str) -> bool:
    """Raises: ValueError for any other word."""
    return ("no", "yes").index(text) == 1


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers joined by commas. Raises: ValueError."""
    return tuple(int(part) for part in text.split(","))


def two_numbers(text: str) -> tuple[int, int]:
    """Raises: ValueError unless there are two."""
    first, second = numbers(text)
    return first, second


def chances(text: str) -> tuple[tuple[float, ...], ...]:
    """Rows of numbers, as A,B,.../C,D,... Raises: ValueError."""
    return tuple(tuple(float(part) for part in row.split(",")) for row in text.split("/"))


_FORMS: dict[Any, str] = {
    int: "N", float: "X", yes_or_no: "yes|no", numbers: "N,N,...", two_numbers: "N,N", chances: "X,X,.../X,...",
    tree: "TREE", parse_paths: "SHAPE", stops.parse: "STOP", read_acceptance: "FOLDER", read_judge: "FILE",
}  # fmt: skip
_WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", yes_or_no: "yes or no", numbers: "whole numbers joined by commas",
    two_numbers: "two whole numbers joined by a comma", chances: "rows of numbers such as .6,.2/.4,.1",
}  # fmt: skip


def read_call(spec: str, options: Sequence[Option]) -> dict[str, Any]:
    """The options of a call such as `NAME:0.2,delta=0.4`, in the order of the table or by name.

    Raises: UsageError for values that are too many, unknown or of the wrong type, or a missing one.
    """
    name, _, rest = spec.partition(":")
    known = {option.name: option for option in options}
    values: dict[str, Any] = {}
    for place, part in enumerate(rest.split(",") if rest else ()):
        word, equals, text = part.partition("=")
        if not equals:
            word, text = (options[place].name if place < len(options) else part), part
        if word not in known or word in values:
            forms = ", ".join(f"{option.name}={option.form}" for option in options) or "nothing"
            raise UsageError(f'"{spec}": {name} takes {forms}, each once, and not "{part}"')
        values[word] = known[word].parse(text)
    missing = [option for option in options if option.default is REQUIRED and option.name not in values]
    if missing:
        raise UsageError(f'"{spec}" lacks {missing[0].name}, {missing[0].help}; write {name}:{missing[0].form}')
    return values
