"""History of a training run, a JSON Lines file with one line per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.training.loop.trainer import TrainingProgress


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the steps in a file, up to the first invalid line.

    Raises: UsageError for a file of another program, whose lines a resumed run would replace.
    """
    history: list[dict[str, Any]] = []
    if not path.exists():
        return history
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            is_own = entry.keys() >= {"step", "loss", "served", "best"}
            history.append(entry | {"step": int(entry["step"])})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            break
        if not is_own:
            raise UsageError(f"{path} is not the history of a training run; give another folder")
    return history


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
        self.entries = read_history(path)

    def add(self, progress: TrainingProgress) -> None:
        """Add a step, and write it to the file."""
        entry = to_entry(progress)
        is_repeated = bool(self.entries) and self.entries[-1]["step"] >= entry["step"]
        if is_repeated:
            self.entries = [old for old in self.entries if old["step"] < entry["step"]]
        self.entries.append(entry)
        if not self.writes:
            return
        lines = self.entries if is_repeated else [entry]
        try:
            with self.path.open("w" if is_repeated else "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written ({error.strerror}); make room, and run it again"
            ) from error

    @property
    def has_best(self) -> bool:
        """Return True if a step has stored a best head or model."""
        return any(entry["best"] for entry in self.entries)
