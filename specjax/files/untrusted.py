"""Files that others wrote: none that never ends, none without a limit, and what is wrong with one in one sentence."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import reprlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.errors import UsageError

MOST_BYTES = 1 << 26  # of a file that is read at once
SENTENCE = 1000  # characters of an error
QUOTED = 80  # characters of what an error quotes out of a file

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = QUOTED


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """The boundary of all that parses files: whatever a damaged or hostile one raises becomes a UsageError.

    Not so a lack of memory: a size must be compared with the file before so much is asked for.

    Args: what: the file or folder, as the sentence names it.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(cut(str(error), SENTENCE)) from error.__cause__
    except OSError as error:
        raise UsageError(f"{what} cannot be read ({error.strerror or reason(error)})") from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # panics of libraries written in Rust are no `Exception`
        raise UsageError(f"{what} is damaged, or of another kind than its name says ({reason(error)})") from error


@functools.cache
def orbax():
    """The library of checkpoints, imported when first needed, and quieter than it is."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # it would print what a damaged file holds
    return ocp


def check_regular(path: str | os.PathLike) -> None:
    """Raises: UsageError for a folder, a pipe, whose opening waits for a writer, or a device, which may have no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UsageError(f"{path} is not a regular file; remove it or put the file itself there")


def check_folder(folder: Path) -> None:
    """`check_regular` for all that lies in a folder, as libraries open what they like of it."""
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not entry.is_dir():
            check_regular(entry)


def read_bytes(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """All of a regular file. Raises: UsageError for another or a longer one; OSError."""
    check_regular(path)
    with open(path, "rb") as file:
        contents = file.read(most + 1)
    if len(contents) > most:
        raise UsageError(f"{path} has more than {most:,} bytes, which no such file needs")
    return contents


def read_json(path: str | os.PathLike, fix: str = "") -> Any:
    """What a JSON file says. `fix`: ends the sentence. Raises: UsageError for what is none; OSError."""
    return parse_json(read_bytes(path), path, fix)


def read_json_object(file: Path) -> dict | None:
    """Return the object in a JSON file, or None if the file does not exist. Raises: UsageError if it is no object."""
    if not file.exists():
        return None
    contents = read_json(file)
    if not isinstance(contents, dict):
        raise UsageError(f"{file} is not a JSON object")
    return contents


def parse_json(contents: bytes, where: object, fix: str = "", **options: Any) -> Any:
    """What JSON in a file says. `options`: of `json.loads`."""
    behind = f"; {fix}" if fix else ""
    try:
        return json.loads(contents, **options)
    except UsageError:
        raise
    except RecursionError:
        raise UsageError(f"{where} is not valid JSON (nested too deep){behind}") from None
    except ValueError as error:  # bytes that are no text and numbers of thousands of digits too
        raise UsageError(f"{where} is not valid JSON ({reason(error)}){behind}") from None


def shown(value: object) -> str:
    """A value out of a file as a sentence may quote it: short, on one line, nothing in it that a terminal obeys."""
    if isinstance(value, str):
        return f'"{cut(repr(value[: QUOTED + 1])[1:-1], QUOTED)}"'
    return cut(_repr.repr(value), QUOTED)


def reason(error: BaseException) -> str:
    """An error of Python or of a library, as a sentence may quote it."""
    lines = str(error).strip().splitlines()
    return cut(lines[0], 2 * QUOTED) if lines else type(error).__name__


def cut(text: str, most: int) -> str:
    """A text without its middle, if it is longer."""
    half = most // 2 - 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
