"""Checkpoints of a training run, its last state and best parameters, from which an interrupted run resumes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.files.homes import in_home
from specjax.files.untrusted import first_line, quote, read_json
from specjax.persistence.checkpoint import restore, save
from specjax.persistence.fingerprint import digest
from specjax.training.measure.acceptance_eval import MeasuredAcceptance
from specjax.training.objectives.trainables import Trainable
from specjax.types import PyTree

# Orbax's CheckpointManager with best_fn does not repeat the same events after a resumption. It commits a best step
# before its state, so a step that runs again after an interruption already counts. It also prefers the later of two
# equal steps.
RUN_FILE = "run.json"


class RunPosition(NamedTuple):
    """The progress of a run at its last checkpoint."""

    step: int = 0
    tokens: int = 0  # trained positions
    seconds: float = 0.0
    best: int | None = None  # step of the best parameters; None: no evaluation yet
    served: float = 0.0  # tokens per pass of the best parameters
    since_best: int = 0  # evaluations without improvement since that step


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The names of a run's checkpoints in its folder. They end with the run's id, a digest of its identity.

    Other files of the folder are neither read nor deleted.
    """

    path: Path
    run_id: str

    def step(self, number: int) -> Path:
        """Return the folder of the state after a step."""
        return self.path / f"step-{number}-{self.run_id}"

    def best(self, number: int) -> Path:
        """Return the folder of the best parameters, which a step had."""
        return self.path / f"best-{number}-{self.run_id}"

    def delete_others(self, *named: Path) -> None:
        """Delete all checkpoints of this run except the named ones, and the remains of its interrupted writes."""
        pattern = re.compile(rf"(step|best)-\d+-{self.run_id}(\.orbax-checkpoint-tmp.*)?")
        for path in self.path.iterdir():
            if path not in named and pattern.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def to_json_values(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the values that JSON reads back: tuples become lists, and NumPy numbers become plain numbers.

    Raises: UsageError for values that JSON cannot store.
    """
    try:
        return json.loads(json.dumps(dict(identity), default=lambda value: np.asarray(value).tolist(), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
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
        run = read_json(path)
        about, position = dict(run["about"]), _parse_position(run["reached"])
        different = [name for name, value in to_json_values(identity).items() if about.get(name) != value]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(f"{folder} cannot hold a run ({first_line(error)}); give another folder") from error
    if different:
        raise UsageError(
            f"{folder} holds a run with other {', '.join(different)}; use the same values, or give a new folder"
        )
    return position


def _parse_position(reached: Mapping[str, Any]) -> RunPosition:
    """Return the position in a file. Raises: ValueError, TypeError or OverflowError for other values."""
    position = RunPosition(**reached)
    counts = {name: value for name, value in position._asdict().items() if name not in ("seconds", "served")}
    for name, value in counts.items():
        is_unset = name == "best" and value is None
        if not is_unset and (type(value) is not int or not 0 <= value < 1 << 62):
            raise ValueError(f"{RUN_FILE} has {name} {quote(value)}, not a count")
    for name in ("seconds", "served"):
        value = getattr(position, name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{RUN_FILE} has {name} {quote(value)}, not a number")
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
        self.trainable, self.state, self.identity = trainable, state, to_json_values(identity)
        self.best: Trainable | None = None
        self.position = RunPosition()
        self.folder: RunFolder | None = None
        if folder is not None:
            run_id = digest(json.dumps(self.identity, sort_keys=True).encode())[:12]
            self.folder = RunFolder(in_home(folder), run_id)
            self._restore(self.folder)

    def _restore(self, folder: RunFolder) -> None:
        self.position = read_position(folder.path, self.identity)
        if self.position.step:
            self.state = restore(folder.step(self.position.step), self.state)
        if self.position.best is not None:
            params = restore(folder.best(self.position.best), self.trainable.params)
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
            save(self.folder.best(step), trainable.params)
        return True

    def save_state(self, state: Any, tokens: int, seconds: float) -> None:
        """Store the state of the run, and delete its older checkpoints.

        Args: tokens: trained positions so far. seconds: training time so far.
        """
        self.state = state
        self.position = self.position._replace(step=int(state.step), tokens=tokens, seconds=seconds)
        if self.folder is None:
            return
        save(self.folder.step(self.position.step), state)
        if jax.process_index():  # all hosts write the checkpoint, but only the first one names it
            return
        path, document = self.folder.path / RUN_FILE, {"about": self.identity, "reached": self.position._asdict()}
        try:
            write_atomic(path, (json.dumps(document, indent=2) + "\n").encode())
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); make room, and run it again") from error
        best = () if self.position.best is None else (self.folder.best(self.position.best),)
        self.folder.delete_others(self.folder.step(self.position.step), *best)
