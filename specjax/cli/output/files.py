"""Reading of text files, and writing of files that are complete or absent."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from specjax.errors import UsageError, require
from specjax.files.atomic import open_atomic

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a full disk or a failing device."""


MAX_TEXT_BYTES = 1 << 28
"""Maximum size of a text file. Pipes and devices may never end."""


def read_text(path: Path, flag: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a file. Raises: UsageError that names the flag."""
    try:
        with open(path, "rb") as file:
            contents = file.read(max_bytes + 1)
        require(len(contents) <= max_bytes, f"{flag}: {path} has more than {max_bytes:,} bytes; give a shorter file")
        return contents.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {path} is not UTF-8 text (byte {error.start}); convert it") from None
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {path} ({error.strerror or error}); check the path") from None


def check_writable(path: Path, flag: str) -> None:
    """Raise a UsageError for a file that cannot be written, before anything is computed."""
    require(not os.path.isdir(path), f"{flag}: {path} is a folder; name a file")
    is_free = not os.path.exists(path) or os.path.isfile(path)
    require(is_free, f"{flag}: {path} is a device, which would be replaced; name a file")
    require(os.path.isdir(path.parent), f"{flag}: there is no folder {path.parent}; create it first")
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{flag}: cannot write {path} ({error.strerror}); choose another path") from None


def write_json(path: Path, document: dict) -> None:
    """Write a JSON document completely, or not at all."""
    content = json.dumps(document, allow_nan=False, indent=1).encode()
    write_atomically(path, lambda file: file.write(content))


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with a file that replaces `path` when it is complete."""
    try:
        with open_atomic(path) as file:
            write(file)
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror or error}); free some space or choose another path"
        ) from None
