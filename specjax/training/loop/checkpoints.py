"""A run of training in a folder: its last state and the best that was served, so that one that was ended goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.persistence.checkpoint import restore, save
from specjax.training.measure.acceptance_eval import Served
from specjax.training.objectives.trainables import Pupil
from specjax.types import PyTree

ABOUT = "run.json"


class Reached(NamedTuple):
    """Where a run stands, in numbers."""

    step: int = 0
    tokens: int = 0  # places trained on
    seconds: float = 0.0
    best: int | None = None  # the step of the best; None: nothing was measured
    served: float = 0.0  # by the best, tokens per pass
    since_best: int = 0  # measurements since that were no better


def plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists for tuples, numbers for NumPy's. Raises: UsageError for what it cannot hold."""
    try:
        return json.loads(json.dumps(dict(about), default=lambda value: np.asarray(value).tolist(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"what a run is known by must be plain values ({error})") from error


def found(folder: Path, about: Mapping[str, Any]) -> Reached:
    """Where the run of a folder stands, which is made, if it has this in common with ours.

    Raises: UsageError for the folder of another run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / ABOUT
        if not known.exists():
            return Reached()
        run = json.loads(known.read_text(encoding="utf-8"))
        others = [name for name, value in plain(about).items() if run["about"].get(name) != value]
        reached = Reached(**run["reached"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder} cannot hold a run ({error}); give another folder") from error
    if others:
        raise UsageError(
            f"{folder} holds a run with other {', '.join(others)}; continue it with the same, or give a new folder"
        )
    return reached


class Kept:
    """Where a run stands. Without a folder it remembers the best pupil alone.

    `run.json` names the state and the best, which are written before it and deleted after the next are named: whenever
    a run is ended, it goes on from what that names. Of several hosts all see the folder.
    """

    def __init__(self, folder: str | Path | None, pupil: Pupil, state: PyTree, about: Mapping[str, Any]):
        """state: that of the beginning, which stays where the folder has none.

        Raises: UsageError for the folder of another run.
        """
        self.folder = None if folder is None else Path(folder)
        self.pupil, self.state, self.about = pupil, state, plain(about)
        self.best: Pupil | None = None
        self.reached = Reached()
        if self.folder is not None:
            self._find(self.folder)

    def _find(self, folder: Path) -> None:
        self.reached = found(folder, self.about)
        if self.reached.step:
            self.state = restore(self._state(self.reached.step), self.state)
        if self.reached.best is not None:
            params = restore(self._best(self.reached.best), self.pupil.params)
            self.best = dataclasses.replace(self.pupil, params=params)

    def _state(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"step-{step}"

    def _best(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"best-{step}"

    def consider(self, pupil: Pupil, step: int, served: Served) -> bool:
        """Whether none before served more; then this is the best. `keep` is to follow."""
        if self.best is not None and served.per_pass <= self.reached.served:
            self.reached = self.reached._replace(since_best=self.reached.since_best + 1)
            return False
        self.best = pupil
        self.reached = self.reached._replace(best=step, served=served.per_pass, since_best=0)
        if self.folder is not None:
            save(self._best(step), pupil.params)
        return True

    def keep(self, state: Any, tokens: int, seconds: float) -> None:
        """The state of a run after some steps, places trained on and seconds."""
        self.state = state
        self.reached = self.reached._replace(step=int(state.step), tokens=tokens, seconds=seconds)
        if self.folder is None:
            return
        save(self._state(self.reached.step), state)
        if jax.process_index():  # what is saved is of all hosts, what names it of the first
            return
        known = {"about": self.about, "reached": self.reached._asdict()}
        try:
            write_atomic(self.folder / ABOUT, (json.dumps(known, indent=2) + "\n").encode())
        except OSError as error:
            where = self.folder / ABOUT
            raise UsageError(f"{where} cannot be written ({error.strerror}); make room, and run it again") from error
        named = {f"step-{self.reached.step}", f"best-{self.reached.best}"}
        for old in (*self.folder.glob("step-*"), *self.folder.glob("best-*")):
            if old.name not in named:  # or what a write that was ended has left
                shutil.rmtree(old, ignore_errors=True)
