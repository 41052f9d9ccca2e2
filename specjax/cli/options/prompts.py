"""Prompts from the command line and from files. A bad line is reported with its number, and the other lines run."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.cli.output.console import drop_library_messages
from specjax.cli.output.files import MAX_TEXT_BYTES, read_text
from specjax.errors import UsageError, require
from specjax.files.homes import in_home
from specjax.files.untrusted import is_text
from specjax.models.vision.processor import ImageProcessor, Tiles, picture_turn

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that Spec-Bench reports as one task."""


class Prompt(NamedTuple):
    """A prompt, and its position in a file."""

    text: str
    line: int | None = None  # from 1
    task: str = "all"
    question_id: Any = None
    images: tuple[Path, ...] = ()


class BadLine(NamedTuple):
    """A line that cannot be used, and the reason."""

    line: int | None
    error: str


Lines = tuple[list[Prompt], list[BadLine]]


def from_arguments(prompt: str | None, batch_file: Path | None, *, reads_images: bool = False) -> Lines:
    """Return the prompt of the command line, of stdin ("-"), or those of a file."""
    require((prompt is None) != (batch_file is None), "give either a PROMPT or --batch-file FILE, not both")
    if batch_file is not None:
        return read(batch_file, "--batch-file", reads_images=reads_images)
    try:
        text = sys.stdin.read(MAX_TEXT_BYTES + 1) if prompt == "-" else str(prompt)
    except UnicodeDecodeError as error:
        raise UsageError(f"the PROMPT on stdin is not UTF-8 text (byte {error.start}); convert it") from None
    require(
        len(text) <= MAX_TEXT_BYTES,
        f"the PROMPT on stdin has more than {MAX_TEXT_BYTES:,} characters; give a shorter text",
    )
    require(is_text(text), "the PROMPT is not UTF-8 text; convert it")
    require(bool(text.strip()), "the PROMPT is empty; give some text, or - to read it from stdin")
    return [Prompt(text)], []


def read(path: Path, flag: str, *, jsonl: bool | None = None, reads_images: bool = False) -> Lines:
    """Read the prompts of a file: JSON objects with "turns" (the first one) or "prompt", or plain text, one per line.

    Args:
      flag: the flag of the file, for errors. jsonl: None: True for .jsonl files and files that begin with a brace.
      reads_images: objects may have "images", a list of files, relative to the folder of this file.

    Raises: UsageError if the file cannot be read or contains no prompts.
    """
    lines = read_text(path, flag).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    require(bool(numbered), f"{flag}: {path} contains no prompts; write one per line")
    if jsonl is None:
        jsonl = path.suffix in (".jsonl", ".json") or numbered[0][1].lstrip().startswith("{")
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    for number, line in numbered:
        entry = (
            _parse(number, line, path.parent if reads_images else None) if jsonl else Prompt(line.rstrip("\r"), number)
        )
        if isinstance(entry, Prompt):
            prompts.append(entry)
        else:
            bad.append(entry)
    return prompts, bad


def _parse(number: int, line: str, folder: Path | None) -> Prompt | BadLine:
    """Parse one line of JSONL. folder: that of the images; None: the command reads none."""
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
    if not is_text(text):
        return BadLine(number, f'the field "{field}" has half of a surrogate pair, which is no character')
    category = entry.get("category", "all")
    if not isinstance(category, str) or not category or not is_text(category):
        return BadLine(number, 'the field "category" must be a string')
    name = entry.get("question_id")
    is_valid = is_text(name) if isinstance(name, str) else name is None or isinstance(name, int | float)
    if not is_valid or (isinstance(name, float) and not math.isfinite(name)):
        return BadLine(number, 'the field "question_id" must be a string or a finite number')
    files = [] if entry.get("images") is None else entry["images"]
    if files and folder is None:
        return BadLine(number, 'the field "images" is read by specjax generate with a drafter only; remove it')
    if not isinstance(files, list) or not all(isinstance(file, str) and file and is_text(file) for file in files):
        return BadLine(number, 'the field "images" must be a list of files')
    images = tuple((folder or Path()) / in_home(file) for file in files)
    for image in images:
        if not os.path.isfile(image):  # `Path.is_file` raises an error for a long name
            return BadLine(number, f"there is no image {image}")
    return Prompt(text, number, "mt_bench" if category in MT_BENCH else category, name, images)


DIGITS = 640
"""Maximum digits of an integer that Python reads and writes under any of its settings."""


def _integer(digits: str) -> float:
    return int(digits) if len(digits) <= DIGITS else math.inf


class Encoded(NamedTuple):
    """A prompt as ids."""

    prompt: Prompt
    ids: list[int]
    ordinal: int  # index among all prompts, which selects its random key
    source: list[int] | None = None  # what the encoder of an encoder-decoder reads; the text is then its first token
    tiles: Tiles | None = None  # the images of the prompt


def system_turn(system: str | None) -> list[dict[str, str]]:
    """Return the messages before the first turn of the user."""
    return [] if system is None else [{"role": "system", "content": system}]


def encode(
    prompts: list[Prompt],
    tokenizer: Any,
    capacity: int,
    max_new_tokens: int,
    *,
    raw: bool = False,
    owner: str = "the model",
    system: str | None = None,
    pictures: Pictures | None = None,
) -> tuple[list[Encoded], list[BadLine]]:
    """Return the ids of the prompts that fit, and the other prompts.

    owner: the model that has this capacity, for errors. raw: skip the chat template. system: text before each prompt.
    pictures: those of every prompt; needed if a prompt has images.

    Raises: UsageError for a bad picture of all prompts. A bad image of one prompt makes a bad line.
    """
    rows, bad = [], []
    for index, prompt in enumerate(prompts):
        with drop_library_messages():
            turn = {"role": "user", "content": prompt.text}
            tiles = None
            if pictures is not None and (pictures.files or prompt.images):
                try:
                    ids, tiles = pictures.encode(prompt, raw=raw, system=system)
                except UsageError as error:
                    if not prompt.images:
                        raise
                    bad.append(BadLine(prompt.line, str(error)))
                    continue
            else:
                ids = list(tokenizer.encode(prompt.text) if raw else tokenizer.chat([*system_turn(system), turn]))
        if not ids:
            bad.append(BadLine(prompt.line, "the prompt has no tokens; give some text"))
        elif len(ids) + max_new_tokens > capacity:
            bad.append(
                BadLine(
                    prompt.line,
                    f"the prompt has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}, over {owner}'s "
                    f"capacity of {capacity}; shorten the prompt or lower --max-new-tokens",
                )
            )
        else:
            rows.append(Encoded(prompt, ids, index, tiles=tiles))
    return rows, bad


def as_sources(rows: list[Encoded], text_start: Sequence[int]) -> list[Encoded]:
    """Return the rows of an encoder-decoder: the prompt is the source, and the text begins with `text_start`."""
    return [row._replace(ids=[*text_start], source=row.ids) for row in rows]


class Pictures(NamedTuple):
    """The pictures of every prompt, with the image processor of the target."""

    files: Sequence[Path]
    processor: ImageProcessor

    def encode(self, prompt: Prompt, *, raw: bool, system: str | None) -> tuple[list[int], Tiles | None]:
        """Return the ids and tiles of a prompt. Those of every prompt come first, and its text comes last."""
        files = [*self.files, *prompt.images]
        if raw or system is None:
            return (self.processor.raw if raw else self.processor.chat)(prompt.text, files)
        return self.processor.chat([*system_turn(system), picture_turn(prompt.text, len(files))], files)


class PromptSource(NamedTuple):
    """The flags that select the prompts."""

    prompt: str | None
    batch_file: Path | None = None
    raw: bool = False
    system: str | None = None
    reads_images: bool = False  # lines of the file may have images

    def read(self) -> Lines:
        """Read the prompts, before the models are loaded. Raises: UsageError if no line is good."""
        prompts, bad = from_arguments(self.prompt, self.batch_file, reads_images=self.reads_images)
        if not prompts:
            raise UsageError(describe(bad, self.batch_file))
        return prompts, bad

    def encode(
        self, lines: Lines, session: Any, max_new_tokens: int, pictures: Pictures | None = None
    ) -> tuple[list[Encoded], list[BadLine]]:
        """Return the ids of the prompts that fit the models, and all bad lines. Raises: UsageError if none fits."""
        prompts, bad = lines
        rows, unfit = encode(
            prompts, session.tokenizer, session.capacity, max_new_tokens, raw=self.raw, owner=session.capacity_owner,
            system=self.system, pictures=pictures,
        )  # fmt: skip
        bad = sorted(bad + unfit, key=lambda entry: entry.line or 0)
        if not rows:
            raise UsageError(describe(bad, self.batch_file))
        return rows, bad


LISTED = 5
"""Number of bad lines in an error; --json has all of them."""


def describe(bad: Sequence[BadLine], path: Path | None) -> str:
    """Return one sentence about bad lines, with their numbers."""
    parts = [
        entry.error if entry.line is None else f"{path}, line {entry.line}: {entry.error}" for entry in bad[:LISTED]
    ]
    return "; ".join(parts) + (f"; and {len(bad) - LISTED} more bad lines" if len(bad) > LISTED else "")
