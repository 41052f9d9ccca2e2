"""A run of training in a folder: its last state and the best that was served, so that one that was ended goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.parallel.checkpoint import restore, save
from specjax.training.learners import Pupil
from specjax.training.served import Served
from specjax.types import PyTree

ABOUT, BEST = "run.json", "best"


class Kept:
    """Where a run stands. Without a folder it remembers the best pupil alone.

    A state is written beside the one before, which is deleted once it is whole: whenever a run is ended, one is there.
    """

    def __init__(self, folder: str | Path | None, pupil: Pupil, state: PyTree, about: Mapping[str, Any]):
        """state: that of the beginning, which stays where the folder has none.

        Raises: UsageError for the folder of another run.
        """
        self.folder = None if folder is None else Path(folder)
        self.pupil, self.state = pupil, state
        self.best: Pupil | None = None
        self.served = 0.0
        if self.folder is not None:
            self._find(dict(about))

    def _find(self, about: dict[str, Any]) -> None:
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            known = self.folder / ABOUT
            found = json.loads(known.read_text(encoding="utf-8")) if known.exists() else None
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder} cannot hold a run ({error}); give another folder") from error
        if found is None:
            self._write({"about": about, "served": 0.0})
            return
        others = [name for name, value in about.items() if found.get("about", {}).get(name) != value]
        if others:
            raise UsageError(
                f"{self.folder} holds a run with other {', '.join(others)}; continue it with the same, or give a new "
                "folder"
            )
        states = self._states()
        if states:
            self.state = restore(states[-1], self.state)
        if found["served"]:
            self.served = found["served"]
            self.best = dataclasses.replace(self.pupil, params=restore(self.folder / BEST, self.pupil.params))

    def _states(self) -> list[Path]:
        assert self.folder is not None
        return sorted(self.folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))

    def _write(self, found: dict[str, Any]) -> None:
        assert self.folder is not None
        part = self.folder / f"{ABOUT}.part"
        part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        part.replace(self.folder / ABOUT)

    def keep(self, state: Any) -> None:
        """The state of a run after some steps."""
        self.state = state
        if self.folder is None:
            return
        before = self._states()
        save(self.folder / f"step-{int(state.step)}", state)
        for old in before:
            if old.name != f"step-{int(state.step)}":
                shutil.rmtree(old, ignore_errors=True)

    def consider(self, pupil: Pupil, served: Served) -> bool:
        """Whether none before served more; then this is the best."""
        if self.best is not None and served.per_pass <= self.served:
            return False
        self.best, self.served = pupil, served.per_pass
        if self.folder is not None:
            save(self.folder / BEST, pupil.params)
            found = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
            self._write(found | {"served": self.served})
        return True
