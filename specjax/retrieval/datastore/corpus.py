"""Reading of corpora: text files, one document each, and JSONL, one document per line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import check_regular

FIELDS = ("text", "turns", "prompt")
BLOCK = 1 << 20
"""Characters of a text file that are tokenized together. The text is cut at the end of a line."""


class TextBlock(NamedTuple):
    """A piece of a document."""

    text: str
    ends: bool  # True if the document ends with this piece
    size: int  # bytes in its file


class Survey(NamedTuple):
    """Hash and size of a corpus."""

    digest: str
    documents: int
    size: int  # bytes


def survey(blocks: Iterable[TextBlock]) -> Survey:
    """Read a corpus once. Raises: UsageError as `read` does."""
    digest, documents, size = hashlib.blake2b(digest_size=16), 0, 0
    for block in blocks:
        digest.update(block.text.encode())
        digest.update(b"\xff" if block.ends else b"\xfe")  # these bytes occur in no UTF-8 text
        documents += block.ends
        size += block.size
    return Survey(digest.hexdigest(), documents, size)


def read(files: Sequence[Path], fields: Sequence[str] = ()) -> Iterator[TextBlock]:
    """Yield the documents of files, without blank ones.

    Args:
      fields: names of JSONL fields whose values, strings or lists of strings, are joined by newlines. If empty, the
        first of FIELDS that a line has is used.

    Raises: UsageError that names file and line, for input that cannot be read.
    """
    for file in files:
        try:
            check_regular(file)  # a pipe could not be read twice
            with open(file, encoding="utf-8-sig", newline="") as handle:
                if file.suffix == ".jsonl":
                    for number, line in enumerate(handle, 1):
                        text = _document(line, fields, f"{file}, line {number}") if line.strip() else ""
                        if text.strip():
                            yield TextBlock(text, True, len(line.encode()))
                else:
                    yield from _blocks(handle)
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not UTF-8 text (byte {error.start}); convert it or leave it out") from None
        except OSError as error:
            raise UsageError(f"cannot read {file} ({error.strerror or error}); check the path") from None


def _blocks(handle) -> Iterator[TextBlock]:
    block = handle.read(BLOCK) + handle.readline(BLOCK)
    while block:
        following = handle.read(BLOCK) + handle.readline(BLOCK)
        if block.strip() or following:
            yield TextBlock(block, not following, len(block.encode()))
        block = following


def _document(line: str, fields: Sequence[str], where: str) -> str:
    try:
        entry = json.loads(line, parse_int=float)  # int() limits the number of digits
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); fix or remove it") from None
    except RecursionError:
        raise UsageError(f"{where}: its lists or objects are nested too deeply; fix or remove it") from None
    if not isinstance(entry, dict):
        raise UsageError(f'{where}: not a JSON object; write {{"text": "..."}}')
    names = fields or [name for name in FIELDS if name in entry][:1]
    if not names:
        raise UsageError(f"{where}: it has none of the fields {', '.join(FIELDS)}; name one with --field")
    parts: list[str] = []
    for name in names:
        value: Any = entry.get(name)
        parts += value if isinstance(value, list) else [value]
        if not all(isinstance(part, str) for part in parts):
            raise UsageError(f'{where}: the field "{name}" is not a string or list of strings; choose another --field')
    return "\n".join(parts).encode(errors="replace").decode()  # JSON can contain half a surrogate pair
