"""Checkpoints of finished batches: the same command continues after them.

They serve programs that write a whole batch at once, so that a batch has no state to continue from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.cli.output.files import write_json
from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, read_json
from specjax.persistence.fingerprint import check_run


def make_folder(name: str) -> Path:
    """Create a local folder for checkpoints, and return it. Raises: UsageError if it cannot be created."""
    if "://" in name:
        raise UsageError(f"--checkpoint of this method must be a local folder, not {name}; choose another one")
    folder = in_home(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--checkpoint: cannot create {name} ({error.strerror}); choose another folder") from None
    return folder


class BatchCheckpoints:
    """A folder with a JSON file per finished batch."""

    def __init__(self, folder: str, run: Mapping[str, str]):
        """Create the folder. Raises: UsageError if it cannot be created.

        run: digests of all inputs that determine the texts, under names that errors can use.
        """
        self.folder, self.run = make_folder(folder), dict(run)

    def read(self, number: int) -> Any:
        """Return the contents of a batch, or None. Raises: UsageError for another run's file, or a damaged one."""
        path = self._path(number)
        if not path.exists():
            return None
        with guarded_read(path):
            document = read_json(path, "remove it, or choose another folder")
            run, batch = document["run"], document["batch"]
            check_run(self.folder, self.run, run)
        return batch

    def write(self, number: int, batch: Any) -> None:
        """Write a batch. Raises: UsageError if the file cannot be written."""
        write_json(self._path(number), {"run": self.run, "batch": batch})

    def _path(self, number: int) -> Path:
        return self.folder / f"batch-{number:05d}.json"
