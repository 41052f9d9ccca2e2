"""Checkpoints of a training run, its last state and best parameters, from which an interrupted run resumes."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.persistence.checkpoint import restore, save
from specjax.training.measure.acceptance_eval import MeasuredAcceptance
from specjax.training.objectives.trainables import Trainable
from specjax.types import PyTree

# Orbax's CheckpointManager with best_fn does not repeat the same events after a resumption. It commits a best step
# before its state, so a step that runs again after an interruption already counts. It also prefers the later of two
# equal steps.
RUN_FILE = "run.json"
OWN_FOLDER = re.compile(r"(step|best)-\d+(\.orbax-checkpoint-tmp.*)?")  # including the remains of an interrupted write


class RunPosition(NamedTuple):
    """The progress of a run at its last checkpoint."""

    step: int = 0
    tokens: int = 0  # trained positions
    seconds: float = 0.0
    best: int | None = None  # step of the best parameters; None: no evaluation yet
    served: float = 0.0  # tokens per pass of the best parameters
    since_best: int = 0  # evaluations without improvement since that step


def to_json_values(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the values that JSON reads back: tuples become lists, and NumPy numbers become plain numbers.

    Raises: UsageError for values that JSON cannot store.
    """
    try:
        return json.loads(json.dumps(dict(identity), default=lambda value: np.asarray(value).tolist(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"the identity of a run must be plain values that JSON can store ({error})") from error


def read_position(folder: Path, identity: Mapping[str, Any]) -> RunPosition:
    """Create the folder of a run if needed, and return the position of its run.

    Raises: UsageError if the folder holds a run with another identity.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RUN_FILE
        if not path.exists():
            return RunPosition()
        run = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name, value in to_json_values(identity).items() if run["about"].get(name) != value]
        position = RunPosition(**run["reached"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder} cannot hold a run ({error}); give another folder") from error
    if different:
        raise UsageError(
            f"{folder} holds a run with other {', '.join(different)}; use the same values, or give a new folder"
        )
    return position


class TrainingCheckpoints:
    """The state of a run and its best parameters, in memory and in an optional folder.

    `run.json` names the checkpoint of the state and that of the best parameters. A checkpoint is written before it is
    named, and deleted after the next one is named. An interrupted run therefore always resumes from complete
    checkpoints. All hosts must see the folder.
    """

    def __init__(self, folder: str | Path | None, trainable: Trainable, state: PyTree, identity: Mapping[str, Any]):
        """Restore the run of the folder, if it has one.

        Args: state: the initial state, used if the folder has no run.

        Raises: UsageError if the folder holds another run.
        """
        self.folder = None if folder is None else Path(folder)
        self.trainable, self.state, self.identity = trainable, state, to_json_values(identity)
        self.best: Trainable | None = None
        self.position = RunPosition()
        if self.folder is not None:
            self._restore(self.folder)

    def _restore(self, folder: Path) -> None:
        self.position = read_position(folder, self.identity)
        if self.position.step:
            self.state = restore(folder / f"step-{self.position.step}", self.state)
        if self.position.best is not None:
            params = restore(folder / f"best-{self.position.best}", self.trainable.params)
            self.best = dataclasses.replace(self.trainable, params=params)

    def update_best(self, trainable: Trainable, step: int, measured: MeasuredAcceptance) -> bool:
        """Store the parameters if they have more tokens per pass than all earlier ones. Call `save_state` afterwards.

        Returns: True if the parameters are the best so far.
        """
        if self.best is not None and measured.per_pass <= self.position.served:
            self.position = self.position._replace(since_best=self.position.since_best + 1)
            return False
        self.best = trainable
        self.position = self.position._replace(best=step, served=measured.per_pass, since_best=0)
        if self.folder is not None:
            save(self.folder / f"best-{step}", trainable.params)
        return True

    def save_state(self, state: Any, tokens: int, seconds: float) -> None:
        """Store the state of the run, and delete its older checkpoints.

        Args: tokens: trained positions so far. seconds: training time so far.
        """
        self.state = state
        self.position = self.position._replace(step=int(state.step), tokens=tokens, seconds=seconds)
        if self.folder is None:
            return
        save(self.folder / f"step-{self.position.step}", state)
        if jax.process_index():  # all hosts write the checkpoint, but only the first one names it
            return
        document = {"about": self.identity, "reached": self.position._asdict()}
        try:
            write_atomic(self.folder / RUN_FILE, (json.dumps(document, indent=2) + "\n").encode())
        except OSError as error:
            path = self.folder / RUN_FILE
            raise UsageError(f"{path} cannot be written ({error.strerror}); make room, and run it again") from error
        named = {f"step-{self.position.step}", f"best-{self.position.best}"}
        for path in self.folder.iterdir():
            if path.name not in named and OWN_FOLDER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
