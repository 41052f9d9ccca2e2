"""Options that change the target's logits, the checks of their values, and the processors that they ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specjax.cli.options.common import parsed, require
from specjax.errors import UsageError

if TYPE_CHECKING:
    from specjax.types import Processor

MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", help="Sample from tokens of at least X times the best's probability.", show_default=False),
]
RepetitionOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", help="Above 1: tokens of prompt and text become less likely.", show_default=False
    ),
]
PresenceOption = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Taken from the logits of tokens of the text.", show_default=False),
]
FrequencyOption = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty", help="Taken from these as often as the text has the token.", show_default=False
    ),
]
BiasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias", help="ID=X, added to the logit of a token. May be given several times.", show_default=False
    ),
]
BanOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ban",
        help="A token that is never drawn: its id, or its text. May be given several times.",
        show_default=False,
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option("--regex", help="Only texts that match all of a regular expression.", show_default=False),
]
SchemaOption = Annotated[
    Path | None,
    typer.Option("--json-schema", help="Only JSON that satisfies the schema in a file.", show_default=False),
]


@dataclass(frozen=True)
class Processing:
    """What the flags say, checked as far as that goes without a model."""

    repetition: float | None = None
    presence: float | None = None
    frequency: float | None = None
    bias: tuple[str, ...] = ()
    ban: tuple[str, ...] = ()
    regex: str | None = None
    schema: str | None = None  # the text of the file

    def __post_init__(self):
        good = self.repetition is None or 0 < self.repetition < math.inf
        require(good, f"--repetition-penalty must be above 0, not {self.repetition}; 1 changes nothing")
        for flag, value in (("--presence-penalty", self.presence), ("--frequency-penalty", self.frequency)):
            require(value is None or math.isfinite(value), f"{flag} must be a number, not {value}; 0 changes nothing")
        require(
            self.regex is None or self.schema is None, "--regex and --json-schema both say what to write; choose one"
        )
        for entry in self.bias:
            _entry(entry)
        require(all(self.ban), "--ban is empty; give the id or the text of a token")

    def processors(self, tokenizer, vocab_size: int) -> tuple[Processor, ...]:
        """In the order of the flags' help. Raises: UsageError for tokens that there are not, or what no text can be."""
        from specjax import processors as p

        chosen = []
        for make, value in (
            (p.repetition, self.repetition),
            (p.presence, self.presence),
            (p.frequency, self.frequency),
        ):
            if value is not None:
                chosen.append(make(value))
        entries = dict(map(_entry, self.bias))
        for token in entries:
            _known("--logit-bias", token, vocab_size)
        entries |= {_token(text, tokenizer, vocab_size): -math.inf for text in self.ban}
        if entries:
            chosen.append(p.bias(entries))
        if self.regex is not None:
            chosen.append(p.constraint(parsed("--regex", lambda text: p.regex(text, tokenizer), self.regex)))
        if self.schema is not None:
            schema = parsed("--json-schema", lambda text: p.json_schema(text, tokenizer), self.schema)
            chosen.append(p.constraint(schema))
        return tuple(chosen)


def read_schema(path: Path | None) -> str | None:
    """The text of a schema's file. Raises: UsageError for a file that cannot be read."""
    from specjax.cli.output.files import read_text

    return None if path is None else read_text(path, "--json-schema")


def _entry(text: str) -> tuple[int, float]:
    """ID=X. Raises: UsageError for anything else."""
    token, _, value = text.partition("=")
    try:
        entry = int(token), float(value)
        require(math.isfinite(entry[1]) and entry[0] >= 0, "")
    except (ValueError, UsageError):
        raise UsageError(f'--logit-bias wants ID=X, a token\'s id and a number, not "{text}"') from None
    return entry


def _known(flag: str, token: int, vocab_size: int) -> int:
    require(token < vocab_size, f"{flag}: there is no token {token}; the vocabulary has {vocab_size}")
    return token


def _token(text: str, tokenizer, vocab_size: int) -> int:
    """The id that `--ban` means."""
    if text.isascii() and text.isdigit():
        return _known("--ban", int(text), vocab_size)
    ids = tokenizer.encode(text, special=False)
    if len(ids) != 1:
        raise UsageError(
            f'--ban: "{text}" is {len(ids)} tokens, {ids}; a text that is one token can be banned, or an id'
        )
    return ids[0]
