"""History of a training run, a JSON Lines file with one line per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.training.loop.trainer import TrainingProgress

FIRST = '{"step": '
"""The beginning of every line."""


class StoredHistory(NamedTuple):
    """The content of a history's file."""

    entries: list[dict[str, Any]]
    is_torn: bool  # True if an interrupted write has left a part of a line


def read_history(path: Path) -> StoredHistory:
    """Return the steps in a file, up to the first invalid line.

    Raises: UsageError for a file of another program, whose lines a resumed run would replace.
    """
    entries: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        if not line:
            continue
        try:
            entry = json.loads(line)
            is_own = entry.keys() >= {"step", "loss", "served", "best"}
            entries.append(entry | {"step": int(entry["step"])})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            is_own = bool(entries) or (text == line and _is_beginning(line))
            if is_own:
                return StoredHistory(entries, is_torn=True)
        if not is_own:
            raise UsageError(f"{path} is not the history of a training run; give another folder")
    return StoredHistory(entries, is_torn=bool(text) and not text.endswith("\n"))


def _is_beginning(line: str) -> bool:
    """Return True for the beginning of a first line, or the zeros that some file systems leave of it."""
    return line.startswith(FIRST) or FIRST.startswith(line) or not line.strip("\0")


def to_entry(progress: TrainingProgress) -> dict[str, Any]:
    """Convert a progress report to values that JSON can store."""
    entry = progress._asdict()
    measured = entry.pop("measured")
    entry["served"] = None if measured is None else {"tokens_per_pass": measured.per_pass, **measured._asdict()}
    return entry | {"accuracy": list(progress.accuracy), "best": progress.best is not None}


class TrainingHistory:
    """A history in memory and in a file. A resumed run replaces the steps that it runs again."""

    def __init__(self, path: Path, writes: bool = True):
        """Read the file, if it exists. Args: writes: write new steps to it. Only one of several hosts may do so."""
        self.path, self.writes = path, writes
        self.entries, self.is_torn = read_history(path)

    def add(self, progress: TrainingProgress) -> None:
        """Add a step, and write it to the file."""
        entry = to_entry(progress)
        is_repeated = bool(self.entries) and self.entries[-1]["step"] >= entry["step"]
        if is_repeated:
            self.entries = [old for old in self.entries if old["step"] < entry["step"]]
        self.entries.append(entry)
        if not self.writes:
            return
        try:
            if is_repeated or self.is_torn:  # a line behind a part of one could not be read
                write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in self.entries).encode())
                self.is_torn = False
            else:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written ({error.strerror}); make room, and run it again"
            ) from error

    @property
    def has_best(self) -> bool:
        """Return True if a step has stored a best head or model."""
        return any(entry["best"] for entry in self.entries)
