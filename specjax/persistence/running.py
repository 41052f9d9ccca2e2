"""Checkpoints of a running decode, from which it continues with the same text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, import_orbax
from specjax.numerics.global_arrays import gather
from specjax.parallel import hosts
from specjax.persistence import fingerprint
from specjax.persistence.checkpoint import Checkpoints
from specjax.persistence.folders import absolute, check_files, guarded_write, make_folder, path_of
from specjax.persistence.named_arrays import abstract, flat, unflat
from specjax.types import DecodeState, Stats

GIVEN = ("keys", "stop")
"""Fields of `DecodeState` that the caller passes again. They are not saved."""
TEXT = ("tokens", "length", "done", "finite")
"""Fields that belong to the result. The last checkpoint of a run has only these and the statistics."""
REST = tuple(name for name in DecodeState._fields if name not in GIVEN + TEXT)
"""All other fields, which only the next step needs."""

UNNAMED = {"text": ["tokens", "length", "done"], "rest": ["cache", "draft", "control"]}
"""Fields of checkpoints of older versions, which do not name their fields."""
OPTIONAL = ("finite",)
"""Fields that an older checkpoint may lack, because the next step computes them again."""

ITEMS = ("about", "text", "rest")
"""The parts of a checkpoint: its description, the result, and the inputs of the next step."""
RETAINED = 2
"""Number of own checkpoints in the folder."""


class OwnSteps:
    """A policy of Orbax that deletes the oldest checkpoints of this run, and no checkpoint of another run."""

    def __init__(self, steps: set[int]):
        self.steps = steps

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return, for each checkpoint in the order of steps, True if it stays."""
        newest = sorted(info.step for info in checkpoints if info.step in self.steps)[-RETAINED:]
        return [info.step not in self.steps or info.step in newest for info in checkpoints]


class Running:
    """The checkpoints of one `stream`. The newest is read once; later ones are written while the steps continue."""

    def __init__(self, checkpoints: Checkpoints, about: Mapping[str, str]):
        if checkpoints.every < 1:
            raise UsageError(f"every must be at least 1 step, not {checkpoints.every}")
        ocp = import_orbax()
        self.folder, self.every, self.about = checkpoints.folder, checkpoints.every, dict(about)
        self.own = OwnSteps(set())
        handlers = {
            "about": ocp.JsonCheckpointHandler(),
            "text": ocp.StandardCheckpointHandler(),
            "rest": ocp.StandardCheckpointHandler(),
        }
        make_folder(self.folder)
        check_files(self.folder)
        with guarded_read(self.folder):
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self.own, create=True, cleanup_tmp_directories=self._owns_remains()
            )
            self.manager = ocp.CheckpointManager(absolute(self.folder), options=options, item_handlers=handlers)
            self.own.steps.update(step for step in self.manager.all_steps() if self._is_own(step))

    def resume(self, state: DecodeState, stats: Stats) -> tuple[int, DecodeState, Stats] | None:
        """Return (number of steps, state, statistics) of the newest checkpoint, or None.

        Args:
          state, stats: values at the start of the run. The cache is deleted before the restored one takes its memory.

        Raises: UsageError if the checkpoint belongs to another run, lacks a part of the state, or does not fit on this
          mesh.
        """
        args = import_orbax().args
        with guarded_read(self.folder):
            step = self.manager.latest_step()  # from this host's own view of the folder
        hosts.check_same(step, f"newest checkpoints in {self.folder}")
        if step is None:
            return None
        fields = self._check(step, self._read(step, about=args.JsonRestore()), state)
        text = (*_select(state, fields["text"]), stats)
        *values, stats = unflat(self._read(step, text=args.StandardRestore(abstract(text))), text)
        saved = state._replace(**dict(zip(fields["text"], values, strict=True)))
        first, count, ids = gather((state.length, saved.length, saved.tokens))
        if ((count < first) | (count > ids.shape[1])).any() or (ids < 0).any():
            raise self._broken(step)
        if not gather(saved.done).all():
            parts = _select(state, fields["rest"])
            shapes = abstract(parts)
            jax.tree.map(lambda x: x.delete(), state.cache)
            values = unflat(self._read(step, rest=args.StandardRestore(shapes)), parts)
            saved = saved._replace(**dict(zip(fields["rest"], values, strict=True)))
        return step, saved, stats

    def _check(self, step: int, about: Any, state: DecodeState) -> dict[str, list[str]]:
        """Check that a checkpoint is of this run and complete. Return the names of its fields. Raises: UsageError."""
        if not isinstance(about, dict) or not isinstance(about.get("run"), dict):
            raise self._broken(step)
        fingerprint.check_run(self.folder, self.about, about["run"])
        if about.get("shapes") != _shapes(state):
            raise UsageError(
                f"the checkpoint in {self.folder} has a batch or cache of other shapes, because its mesh splits the "
                "batch or the heads differently; use the mesh that wrote it, or give another folder"
            )
        fields = about.get("fields", UNNAMED)
        try:
            names = [*fields["text"], *fields["rest"]]
            is_valid = set(names) <= set(TEXT + REST) and len(set(names)) == len(names)
        except (TypeError, KeyError):
            is_valid = False
        if not is_valid:
            raise self._broken(step)
        missing = [name for name in TEXT + REST if name not in names and jax.tree.leaves(getattr(state, name))]
        missing = [name for name in missing if name not in OPTIONAL]
        if missing:
            what = "processors" if missing == ["processed"] else " and ".join(missing)
            raise UsageError(
                f"the checkpoint in {self.folder} was written by an older version, which does not save the state of "
                f"{what}; give another folder to start again"
            )
        return fields

    def _read(self, step: int, **item):
        [name] = item
        try:
            return self.manager.restore(step, args=import_orbax().args.Composite(**item))[name]
        except Exception as error:  # raised by Orbax, by TensorStore, or by their JSON parsers
            raise self._broken(step) from error

    def _broken(self, step: int) -> UsageError:
        return UsageError(
            f"step {step} in {self.folder} is not a complete checkpoint of stream; remove that step, or give another "
            "folder"
        )

    def _is_own(self, step: int) -> bool:
        """Return True if the record of a step names this run."""
        try:
            about = json.loads((path_of(self.folder) / str(step) / "about" / "metadata").read_text())
            return about["run"] == self.about
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    def _owns_remains(self) -> bool:
        """Return True if all remains of interrupted writes have the parts of a checkpoint of `stream` only."""
        suffix = import_orbax().utils.TMP_DIR_SUFFIX
        remains = [path for path in path_of(self.folder).iterdir() if suffix in path.name and path.is_dir()]
        names = {entry.name.partition(suffix)[0] for path in remains for entry in path.iterdir()}
        return names <= {*ITEMS, "_CHECKPOINT_METADATA", "descriptor"}

    def save(self, step: int, state: DecodeState, stats: Stats, *, is_last: bool = False) -> None:
        """Start to write a checkpoint. After the call, the state may be donated.

        Args:
          is_last: True if the run has ended, so that only the text is saved.
        """
        args = import_orbax().args
        about = {"run": self.about, "shapes": _shapes(state), "fields": {"text": TEXT, "rest": REST}}
        text = flat((*_select(state, TEXT), stats))
        items = {"about": args.JsonSave(about), "text": args.StandardSave(text)}
        if not is_last:
            items["rest"] = args.StandardSave(flat(_select(state, REST)))
        self.own.steps.add(step)
        with guarded_write(self.folder):
            self.manager.save(step, args=args.Composite(**items), force=True)

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        with guarded_write(self.folder):
            self.manager.wait_until_finished()
            self.manager.close()


def _select(state: DecodeState, names: Sequence[str]) -> tuple:
    return tuple(getattr(state, name) for name in names)


def _shapes(state: DecodeState) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(state)]
