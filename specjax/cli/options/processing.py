"""Options that change the target's logits: penalties, biases and constraints."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import flag_of
from specjax.cli.output.files import read_text
from specjax.errors import UsageError, require

if TYPE_CHECKING:
    from specjax.types import Processor

RepetitionOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Values above 1 make tokens of the prompt and the text less likely.",
        show_default=False,
    ),
]
PresenceOption = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty", help="Subtracted from the logits of tokens that the text contains.", show_default=False
    ),
]
FrequencyOption = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        help="Subtracted from the logit of a token once per occurrence in the text.",
        show_default=False,
    ),
]
BiasOption = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", help="ID=X adds X to the logit of a token. Repeatable.", show_default=False),
]
BanOption = Annotated[
    list[str] | None,
    typer.Option("--ban", help="Id or text of a token that is never sampled. Repeatable.", show_default=False),
]
BadWordOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bad-word",
        help="Text that the answer does not contain, in its usual tokens, also after a space. Repeatable.",
        show_default=False,
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option("--regex", help="The whole text must match this regular expression.", show_default=False),
]
SchemaOption = Annotated[
    Path | None,
    typer.Option(
        "--json-schema", help="The text must be JSON that satisfies the schema in this file.", show_default=False
    ),
]


@dataclass(frozen=True)
class ProcessingOptions:
    """Penalties, biases and constraints of the text. Values are checked as far as possible without a model."""

    repetition_penalty: RepetitionOption = None
    presence_penalty: PresenceOption = None
    frequency_penalty: FrequencyOption = None
    logit_bias: BiasOption = None
    ban: BanOption = None
    bad_word: BadWordOption = None
    regex: RegexOption = None
    json_schema: SchemaOption = None

    def __post_init__(self):
        penalty = self.repetition_penalty
        is_valid = penalty is None or 0 < penalty < math.inf
        require(is_valid, f"--repetition-penalty must be above 0, not {penalty}; 1 changes nothing")
        for flag, value in (
            ("--presence-penalty", self.presence_penalty), ("--frequency-penalty", self.frequency_penalty)
        ):  # fmt: skip
            require(value is None or math.isfinite(value), f"{flag} must be a number, not {value}; 0 changes nothing")
        require(
            self.regex is None or self.json_schema is None,
            "--regex and --json-schema are both given; remove one of them",
        )
        for entry in self.logit_bias or ():
            _parse_bias(entry)
        require(all(self.ban or ()), "--ban is empty; give the id or the text of a token")
        require(all(word.strip() for word in self.bad_word or ()), "--bad-word is empty; give a text")
        _ = self.schema

    @property
    def flags(self) -> list[str]:
        """Return the flags that are set."""
        fields = dataclasses.fields(self)
        return [flag_of(field.name) for field in fields if getattr(self, field.name) not in (field.default, [], ())]

    @property
    def schema(self) -> str | None:
        """Return the text of the schema. Raises: UsageError for a file that cannot be read."""
        return None if self.json_schema is None else read_text(self.json_schema, "--json-schema")

    def processors(self, tokenizer: Any, vocab_size: int) -> tuple[Processor, ...]:
        """Build the processors. Raises: UsageError for unknown tokens, and constraints that no text satisfies."""
        from specjax import processors as p
        from specjax.processors.bad_words import encode_words

        built = []
        for make, value in (
            (p.repetition, self.repetition_penalty),
            (p.presence, self.presence_penalty),
            (p.frequency, self.frequency_penalty),
        ):
            if value is not None:
                built.append(make(value))
        entries = dict(map(_parse_bias, self.logit_bias or ()))
        for token in entries:
            _check_token("--logit-bias", token, vocab_size)
        entries |= {_banned_token(text, tokenizer, vocab_size): -math.inf for text in self.ban or ()}
        if entries:
            built.append(p.bias(entries))
        if self.bad_word:
            encode = functools.partial(tokenizer.encode, special=False)
            built.append(p.bad_words(encode_words(self.bad_word, encode)))
        if self.regex is not None:
            built.append(p.constraint(parse_flag("--regex", lambda text: p.regex(text, tokenizer), self.regex)))
        if self.schema is not None:
            schema = parse_flag("--json-schema", lambda text: p.json_schema(text, tokenizer), self.schema)
            built.append(p.constraint(schema))
        return tuple(built)


def _parse_bias(text: str) -> tuple[int, float]:
    """Parse ID=X. Raises: UsageError for any other form."""
    token, _, value = text.partition("=")
    try:
        entry = int(token), float(value)
        require(math.isfinite(entry[1]) and entry[0] >= 0, "")
    except (ValueError, UsageError):
        raise UsageError(f'--logit-bias must be ID=X, the id of a token and a number, not "{text}"') from None
    return entry


def _check_token(flag: str, token: int, vocab_size: int) -> int:
    """Return the id. Raises: UsageError for an id outside the vocabulary."""
    require(token < vocab_size, f"{flag}: there is no token {token}; the vocabulary has {vocab_size}")
    return token


def _banned_token(text: str, tokenizer: Any, vocab_size: int) -> int:
    """Return the id of a token that --ban names."""
    if text.isascii() and text.isdigit():
        return _check_token("--ban", int(text), vocab_size)
    ids = tokenizer.encode(text, special=False)
    if len(ids) != 1:
        raise UsageError(f'--ban: "{text}" has {len(ids)} tokens, {ids}; give a text of one token, or an id')
    return ids[0]
