"""Batches that are done, in a folder: the same command goes on behind them.

For programs that write a whole batch at once, within which there is nothing to go on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.cli.output.files import write_json
from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, read_json


class Finished:
    """A folder with a file of JSON per batch."""

    def __init__(self, folder: str, run: Mapping[str, str]):
        """run: digests of what decides the texts, under the names that an error may use.

        Raises: UsageError if the folder cannot be made.
        """
        self.folder, self.run = Path(folder).expanduser(), dict(run)
        if "://" in folder:
            raise UsageError(f"--checkpoint of this method is a folder of this machine, not {folder}; give another one")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--checkpoint: {folder} cannot be made ({error.strerror}); give another folder") from None

    def read(self, number: int) -> Any:
        """What was written of a batch; None: nothing. Raises: UsageError for what is of another run, or damaged."""
        from specjax.persistence.fingerprint import check_run

        path = self._path(number)
        if not path.exists():
            return None
        with guarded_read(path):
            document = read_json(path, "remove it, or give another folder")
            run, batch = document["run"], document["batch"]
            check_run(self.folder, self.run, run)
        return batch

    def write(self, number: int, batch: Any) -> None:
        """Raises: UsageError if that cannot be done."""
        write_json(self._path(number), {"run": self.run, "batch": batch})

    def _path(self, number: int) -> Path:
        return self.folder / f"batch-{number:05d}.json"
