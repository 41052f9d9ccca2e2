"""Safe access to untrusted files: bounded reads, regular files only, and one-sentence errors."""

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

MAX_BYTES = 1 << 26  # limit for a file that is read completely
SENTENCE = 1000  # maximum characters of an error
LFS_POINTER = b"version https://git-lfs"  # the first bytes of such a pointer
QUOTED = 80  # maximum characters of a value from a file that an error quotes

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = QUOTED


@contextlib.contextmanager
def guarded_read(name: object) -> Iterator[None]:
    """Convert every exception of a parser into a UsageError. Use it around all code that parses a file of the user.

    MemoryError is not converted. Code must compare a size with the size of the file before it allocates that much.

    Args:
      name: the name of the file or folder in the error.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(shorten(str(error), SENTENCE)) from error.__cause__
    except OSError as error:
        raise UsageError(f"{name} cannot be read ({error.strerror or first_line(error)})") from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, Warning):  # Warning: filtered to be an error
        raise
    except BaseException as error:  # a panic of a Rust library is not an `Exception`
        raise UsageError(f"{name} is damaged or not of the format of its name ({first_line(error)})") from error


@functools.cache
def import_orbax():
    """Import Orbax on first use and silence its log."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # its log would print the content of a damaged file
    return ocp


def check_regular(path: str | os.PathLike) -> None:
    """Raise UsageError for a folder, a pipe (opening it waits for a writer) or a device (it may never end)."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UsageError(f"{path} is not a regular file; remove it or put the file itself there")


def check_file(path: str | os.PathLike) -> None:
    """Apply `check_regular`, and raise UsageError for a pointer of Git LFS in place of the file itself."""
    check_regular(path)
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UsageError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in its folder")


def check_folder(folder: Path) -> None:
    """Apply `check_regular` to all entries of a folder, because libraries open any of them."""
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not entry.is_dir():
            check_regular(entry)


def read_bytes(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a file. Raises: UsageError if `check_file` does, or it has more than `max_bytes` bytes; OSError."""
    check_file(path)
    with open(path, "rb") as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise UsageError(f"{path} has more than {max_bytes:,} bytes, the limit for such a file")
    return contents


def read_text(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file. Raises: UsageError for a file that cannot be read or is no text."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from None
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror or error}); check the path") from None


def is_text(text: str) -> bool:
    """Return True if a string has whole characters only. Escapes of JSON and arguments can contain halves."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def read_words(path: str | os.PathLike) -> str:
    """Return the text of a file. Raises: UsageError for a file that cannot be read or has no text."""
    text = read_text(path).replace("\r\n", "\n")
    if not text.strip():
        raise UsageError(f"{path} is empty; write some text")
    return text


def read_json(path: str | os.PathLike, fix: str = "") -> Any:
    """Parse a JSON file. `fix` is appended to the error. Raises: UsageError for invalid JSON; OSError."""
    return parse_json(read_bytes(path), path, fix)


def read_json_object(file: Path) -> dict | None:
    """Return the object in a JSON file, or None if there is no file. Raises: UsageError if it is not an object."""
    if not file.exists():
        return None
    contents = read_json(file)
    if not isinstance(contents, dict):
        raise UsageError(f"{file} is not a JSON object")
    return contents


def parse_json(contents: bytes, where: object, fix: str = "", **options: Any) -> Any:
    """Parse JSON bytes that were read from `where`. `options` are passed to `json.loads`. Raises: UsageError."""
    suffix = f"; {fix}" if fix else ""
    try:
        return json.loads(contents, **options)
    except UsageError:
        raise
    except RecursionError:
        raise UsageError(f"{where} is not valid JSON (nested too deep){suffix}") from None
    except ValueError as error:  # also for bytes that are not text, and numbers of thousands of digits
        raise UsageError(f"{where} is not valid JSON ({first_line(error)}){suffix}") from None


def quote(value: object) -> str:
    """Quote a value of a file for an error: short, on one line, without control characters."""
    if isinstance(value, str):
        return f'"{shorten(repr(value[: QUOTED + 1])[1:-1], QUOTED)}"'
    return shorten(_repr.repr(value), QUOTED)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, shortened for an error."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0], 2 * QUOTED) if lines else type(error).__name__


def shorten(text: str, length: int) -> str:
    """Shorten a text to `length` characters by removing its middle."""
    half = length // 2 - 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"
