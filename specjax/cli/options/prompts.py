"""Prompts from the command line and from files. A bad line is reported with its number and does not stop the others."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.cli.options.common import require
from specjax.cli.output.console import one_sentence
from specjax.cli.output.files import MOST, read_text
from specjax.errors import UsageError

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that Spec-Bench reports together."""


class Prompt(NamedTuple):
    """One prompt and where it is from."""

    text: str
    line: int | None = None  # of its file, from 1
    task: str = "all"
    question_id: Any = None


class BadLine(NamedTuple):
    """A line that cannot be used, and why."""

    line: int | None
    error: str


def from_arguments(prompt: str | None, batch_file: Path | None) -> tuple[list[Prompt], list[BadLine]]:
    """The prompt of the command line ("-": of stdin) or those of a file."""
    require(
        (prompt is None) != (batch_file is None), "give either a PROMPT or --batch-file FILE (and not both of them)"
    )
    if batch_file is not None:
        return read(batch_file, "--batch-file")
    try:
        text = sys.stdin.read(MOST + 1) if prompt == "-" else str(prompt)
    except UnicodeDecodeError as error:
        raise UsageError(f"the PROMPT on stdin is not UTF-8 text (byte {error.start}); convert it") from None
    require(len(text) <= MOST, f"the PROMPT on stdin has more than {MOST:,} characters; give a shorter text")
    require(is_whole(text), "the PROMPT is not UTF-8 text; convert it")
    require(bool(text.strip()), "the PROMPT is empty; give some text, or - to read it from stdin")
    return [Prompt(text)], []


def read(path: Path, flag: str, *, jsonl: bool | None = None) -> tuple[list[Prompt], list[BadLine]]:
    """Prompts of a file: JSON objects with "turns" (the first counts) or "prompt", or plain text, one per line.

    Args:
      flag: for messages. jsonl: None: by the suffix, or if the first line starts with a brace.

    Raises: UsageError if the file cannot be read or holds no prompt at all.
    """
    lines = read_text(path, flag).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    require(bool(numbered), f"{flag}: {path} holds no prompts; write one per line")
    if jsonl is None:
        jsonl = path.suffix in (".jsonl", ".json") or numbered[0][1].lstrip().startswith("{")
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    for number, line in numbered:
        entry = _parse(number, line) if jsonl else Prompt(line.rstrip("\r"), number)
        if isinstance(entry, Prompt):
            prompts.append(entry)
        else:
            bad.append(entry)
    return prompts, bad


def _parse(number: int, line: str) -> Prompt | BadLine:
    try:
        entry = json.loads(line, parse_int=_integer)
    except json.JSONDecodeError as error:
        return BadLine(number, f"not valid JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        return BadLine(number, "its lists or objects are nested too deeply")
    if not isinstance(entry, dict):
        return BadLine(number, 'not a JSON object; write {"category": "qa", "turns": ["..."]}')
    field = "turns" if "turns" in entry else "prompt"
    turns = entry.get(field)
    text = turns[0] if isinstance(turns, list) and turns else turns
    if not isinstance(text, str):
        return BadLine(number, 'no text: it needs the field "turns", a list of strings, or "prompt", a string')
    if not text.strip():
        return BadLine(number, "the prompt is empty")
    if not is_whole(text):
        return BadLine(number, f'the field "{field}" has half of a surrogate pair, which is no character')
    category = entry.get("category", "all")
    if not isinstance(category, str) or not category or not is_whole(category):
        return BadLine(number, 'the field "category" must be a string')
    name = entry.get("question_id")
    good = is_whole(name) if isinstance(name, str) else name is None or isinstance(name, int | float)
    if not good or (isinstance(name, float) and not math.isfinite(name)):
        return BadLine(number, 'the field "question_id" must be a string or a finite number')
    return Prompt(text, number, "mt_bench" if category in MT_BENCH else category, name)


DIGITS = 640
"""Of the longest integer that Python reads and writes under any of its settings."""


def _integer(digits: str) -> float:
    return int(digits) if len(digits) <= DIGITS else math.inf


def is_whole(text: str) -> bool:
    """Whether it is made of characters: neither JSON's escapes nor arguments have to be."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


class Encoded(NamedTuple):
    """A prompt as ids."""

    prompt: Prompt
    ids: list[int]
    ordinal: int  # among all prompts: its random key


def opening(system: str | None) -> list[dict[str, str]]:
    """What stands before the first turn of a user."""
    return [] if system is None else [{"role": "system", "content": system}]


def encode(
    prompts: list[Prompt],
    tokenizer,
    capacity: int,
    max_new_tokens: int,
    raw: bool,
    whose: str = "the model",
    system: str | None = None,
) -> tuple[list[Encoded], list[BadLine]]:
    """Ids of the prompts that fit, and the rest. whose: what has the `capacity`. system: said before each, not raw."""
    rows, bad = [], []
    for index, prompt in enumerate(prompts):
        with one_sentence():
            turn = {"role": "user", "content": prompt.text}
            ids = list(tokenizer.encode(prompt.text) if raw else tokenizer.chat([*opening(system), turn]))
        if not ids:
            bad.append(BadLine(prompt.line, "the prompt has no tokens; give some text"))
        elif len(ids) + max_new_tokens > capacity:
            bad.append(
                BadLine(
                    prompt.line,
                    f"the prompt has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}, over {whose}'s "
                    f"capacity of {capacity}; shorten the prompt or lower --max-new-tokens",
                )
            )
        else:
            rows.append(Encoded(prompt, ids, index))
    return rows, bad


class Asked(NamedTuple):
    """The flags that say what is continued."""

    prompt: str | None
    batch_file: Path | None = None
    raw: bool = False
    system: str | None = None

    def read(self) -> tuple[list[Prompt], list[BadLine]]:
        """As `from_arguments`, before the models are loaded. Raises: UsageError if no prompt is good."""
        found, bad = from_arguments(self.prompt, self.batch_file)
        if not found:
            raise UsageError(describe(bad, self.batch_file))
        return found, bad

    def fitting(
        self, prompts: list[Prompt], bad: list[BadLine], session: Any, max_new_tokens: int
    ) -> tuple[list[Encoded], list[BadLine]]:
        """Ids of those that fit the models of a session, and all that are bad. Raises: UsageError if none fits."""
        rows, unfit = encode(
            prompts, session.tokenizer, session.capacity, max_new_tokens, self.raw, session.shortest, self.system
        )
        bad = sorted(bad + unfit, key=lambda entry: entry.line or 0)
        if not rows:
            raise UsageError(describe(bad, self.batch_file))
        return rows, bad


NAMED = 5
"""Bad lines that a sentence names; --json has them all."""


def describe(bad: Sequence[BadLine], path: Path | None) -> str:
    """One sentence about bad lines, by their numbers."""
    said = [entry.error if entry.line is None else f"{path}, line {entry.line}: {entry.error}" for entry in bad[:NAMED]]
    return "; ".join(said) + (f"; and {len(bad) - NAMED} more such lines" if len(bad) > NAMED else "")
