"""Options of methods: declarations, and values parsed from text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.catalog.lazy import import_name
from specjax.errors import UsageError

REQUIRED: Any = ...
"""The default of an option that must be set."""


class Option(NamedTuple):
    """A keyword argument of a factory that the command line can set."""

    name: str
    type: str | tuple[str, ...]  # a key of PARSERS, or the allowed words
    default: Any  # None: the factory chooses
    help: str

    @property
    def form(self) -> str:
        """Return a placeholder that shows how a value is written, such as N or yes|no."""
        return "|".join(self.type) if isinstance(self.type, tuple) else PARSERS[self.type].form

    def parse(self, text: str, name: str | None = None) -> Any:
        """Return the value of a text.

        Args:
          name: the name that errors mention; default: the option's own.

        Raises: UsageError for a text that is not a value of this option.
        """
        name = name or self.name
        if isinstance(self.type, tuple):
            if text not in self.type:
                raise UsageError(f'{name} must be one of {", ".join(self.type)}, not "{text}"')
            return text
        parser = PARSERS[self.type]
        try:
            value = parser.function(text)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        except ValueError:
            raise UsageError(f'{name} must be {parser.description}, not "{text}"') from None
        if isinstance(value, float) and math.isnan(value):  # NaN would pass every range check of a factory
            raise UsageError(f'{name} must be {parser.description}, not "{text}"')
        if any(isinstance(n, int) and abs(n) >= 1 << 31 for n in (value if isinstance(value, tuple) else (value,))):
            raise UsageError(f"{name} must be {parser.description} below 2**31, not {text}")
        return value


class OptionParser(NamedTuple):
    """A type of options: its placeholder, its description for errors, and the function that parses a text."""

    form: str
    description: str
    parse: Callable[[str], Any] | str  # a path such as specjax.trees:parse is imported at the first use

    @property
    def function(self) -> Callable[[str], Any]:
        return import_name(self.parse) if isinstance(self.parse, str) else self.parse


def yes_or_no(text: str) -> bool:
    """Return True for "yes" and False for "no". Raises: ValueError for any other text."""
    return ("no", "yes").index(text) == 1


def integers(text: str) -> tuple[int, ...]:
    """Parse integers that are joined by commas. Raises: ValueError."""
    return tuple(int(part) for part in text.split(","))


def two_integers(text: str) -> tuple[int, int]:
    """Parse exactly two integers that are joined by a comma. Raises: ValueError."""
    first, second = integers(text)
    return first, second


def texts(text: str) -> tuple[str, ...]:
    r"""Return texts that are joined by |, with \n and \t as in a program. Raises: ValueError for an empty one."""
    escapes = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
    parts = [re.sub(r"\\[nt\\]", lambda match: escapes[match[0]], part) for part in text.split("|")]
    if not all(parts):
        raise ValueError("an empty text")
    return tuple(parts)


def integers_in_call(text: str) -> tuple[int, ...]:
    """Parse integers that are joined by /, because commas separate the options of a call. Raises: ValueError."""
    return tuple(int(part) for part in text.split("/"))


def floats_in_call(text: str) -> tuple[float, ...]:
    """Parse numbers that are joined by /, because commas separate the options of a call. Raises: ValueError."""
    return tuple(float(part) for part in text.split("/"))


def floats(text: str) -> float | tuple[float, ...]:
    """Parse a number, or several that are joined by /. Raises: ValueError."""
    numbers = floats_in_call(text)
    return numbers if len(numbers) > 1 else numbers[0]


def rows_of_floats(text: str) -> tuple[tuple[float, ...], ...]:
    """Parse rows of numbers, written as A,B,.../C,D,... Raises: ValueError."""
    return tuple(tuple(float(part) for part in row.split(",")) for row in text.split("/"))


PARSERS: dict[str, OptionParser] = {
    "int": OptionParser("N", "a whole number", int),
    "float": OptionParser("X", "a number", float),
    "yes_or_no": OptionParser("yes|no", "yes or no", yes_or_no),
    "integers": OptionParser("N,N,...", "whole numbers joined by commas", integers),
    "texts": OptionParser("TEXT", "texts joined by |, none of them empty", texts),
    "text_file": OptionParser("FILE", "a file with text", "specjax.files.untrusted:read_words"),
    "text": OptionParser("TEXT", "a text that is not empty", lambda text: "|".join(texts(text))),
    "two_integers": OptionParser("N,N", "two whole numbers joined by a comma", two_integers),
    "integers_in_call": OptionParser("N/N/...", "whole numbers joined by /", integers_in_call),
    "floats_in_call": OptionParser("X/X/...", "numbers joined by /", floats_in_call),
    "floats": OptionParser("X/X/...", "a number, or several joined by / such as .25/.5/1", floats),
    "rows_of_floats": OptionParser("X,X,.../X,...", "rows of numbers such as .6,.2/.4,.1", rows_of_floats),
    "tree": OptionParser("TREE", "a tree", "specjax.trees:parse"),
    "tree_shape": OptionParser("SHAPE", "a static tree", "specjax.trees:parse_paths"),
    "stop": OptionParser("STOP", "a stop condition of drafting", "specjax.trees.stops:parse"),
    "acceptance_head": OptionParser(
        "FOLDER", "an acceptance head", "specjax.models.loading.decision_heads:read_acceptance"
    ),
    "judge_head": OptionParser("FILE", "a judge head", "specjax.models.loading.decision_heads:read_judge"),
    "judge_head_file": OptionParser("FILE", "a head", "specjax.models.loading.decision_heads:check_judge"),
    "model": OptionParser("MODEL", "a model", str),
    "reward_model": OptionParser("FOLDER", "a reward model", str),
    "drafter": OptionParser("NAME", "a drafter", "specjax.catalog.methods:check_inner_drafter"),
    "writing_drafter": OptionParser(
        "NAME", "a drafter without inputs, or two_model", "specjax.catalog.methods:check_writing_drafter"
    ),
    "drafters": OptionParser("NAME", "drafters joined by +", "specjax.catalog.methods:check_inner_drafters"),
    "probes": OptionParser("FILE", "a file of probes", "specjax.adaptive.layer_files:read_probes"),
    "routers": OptionParser("FILE", "a file of routers", "specjax.adaptive.layer_files:read_routers"),
    "filter": OptionParser("FILE", "a trained filter", "specjax.diffusion.methods.learn2pd:read_filter"),
    "spec_kv_weights": OptionParser("FILE", "a file of SpecKV's network", "specjax.controllers.spec_kv:read_spec_kv"),
    "corrections": OptionParser("FILE", "a file of corrections", "specjax.adaptive.layer_files:read_corrections"),
    "depth": OptionParser("NAME", "a method of adaptive depth", "specjax.adaptive.parsing:check_depth"),
}
"""The types of options by name. Parsers that import JAX are named by their path."""


def read_call(spec: str, options: Sequence[Option]) -> dict[str, Any]:
    """Parse the options of a call such as `NAME:0.2,delta=0.4`, in the order of declaration or by name.

    Raises: UsageError for too many values, an unknown name, a value of the wrong type, or a missing one.
    """
    name, _, arguments = spec.partition(":")
    by_name = {option.name: option for option in options}
    values: dict[str, Any] = {}
    for position, part in enumerate(arguments.split(",") if arguments else ()):
        word, equals, text = part.partition("=")
        if not equals:
            word, text = (options[position].name if position < len(options) else part), part
        if word not in by_name or word in values:
            forms = ", ".join(f"{option.name}={option.form}" for option in options) or "nothing"
            raise UsageError(f'"{spec}": {name} takes {forms}, each once, and not "{part}"')
        values[word] = by_name[word].parse(text)
    missing = [option for option in options if option.default is REQUIRED and option.name not in values]
    if missing:
        raise UsageError(f'"{spec}" lacks {missing[0].name}, {missing[0].help}; write {name}:{missing[0].form}')
    return values
