"""Checkpoints of parameters and of running decodes, written by Orbax. They can be restored on another mesh.

Orbax writes to a temporary folder and renames it when all hosts are done, so a checkpoint is complete or absent. On
several hosts, the folder must be visible to all of them, such as a bucket. Every host must make the same calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import check_regular, guarded_read, import_orbax
from specjax.numerics.global_arrays import gather
from specjax.parallel import hosts
from specjax.persistence import fingerprint
from specjax.types import DecodeState, PyTree, Stats


class Checkpoints(NamedTuple):
    """Folder in which `stream` saves its state every `every` steps.

    A run that finds its own checkpoint in the folder continues from it. A state includes the cache, so it can be large.
    """

    folder: str | os.PathLike
    every: int = 64


def save(folder: str | os.PathLike, tree: PyTree) -> None:
    """Save a tree of arrays, such as `target.params`, sharded or not. An old checkpoint in the folder is replaced.

    Typed keys are saved as their data.

    Raises: UsageError if the folder cannot be written, or contains files that are not a checkpoint.
    """
    ocp = import_orbax()
    _make(folder)
    free = _is_free(folder)
    hosts.check_same(free, f"contents of {folder}")  # no host replaces the folder before all hosts have checked it
    if not free:
        raise UsageError(f"{folder} contains other files than a checkpoint, which would be deleted; give a new folder")
    with _explained(folder), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_absolute(folder), _flat(tree), force=True)


def restore(folder: str | os.PathLike, like: PyTree) -> PyTree:
    """Restore a tree that `save` wrote.

    Args:
      like: a tree of the same structure, of arrays or of `jax.ShapeDtypeStruct`s, such as the parameters of
        `abstract_target`. Its shardings place the restored arrays. The mesh may differ from that of `save`.

    Raises: UsageError if there is no checkpoint, or if its arrays have other names, shapes or dtypes.
    """
    ocp = import_orbax()
    _check_files(folder)
    with guarded_read(folder):
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                metadata = checkpointer.metadata(_absolute(folder)).item_metadata
                if metadata is None:
                    raise FileNotFoundError
                _check_shapes(folder, dict(metadata), _abstract(like))
                restored = checkpointer.restore(_absolute(folder), _abstract(like))
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"there is no checkpoint in {folder}; give the path that was passed to save") from None
        return _unflat(restored, like)


class Running:
    """The checkpoints of one `stream`. The newest is read once; later ones are written while the steps continue."""

    def __init__(self, checkpoints: Checkpoints, about: Mapping[str, str]):
        if checkpoints.every < 1:
            raise UsageError(f"every must be at least 1 step, not {checkpoints.every}")
        ocp = import_orbax()
        self.folder, self.every, self.about = checkpoints.folder, checkpoints.every, dict(about)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, cleanup_tmp_directories=True)
        handlers = {
            "about": ocp.JsonCheckpointHandler(),
            "text": ocp.StandardCheckpointHandler(),
            "rest": ocp.StandardCheckpointHandler(),
        }
        _make(self.folder)
        _check_files(self.folder)
        with guarded_read(self.folder):
            self.manager = ocp.CheckpointManager(_absolute(self.folder), options=options, item_handlers=handlers)

    def resume(self, state: DecodeState, stats: Stats) -> tuple[int, DecodeState, Stats] | None:
        """Return (number of steps, state, statistics) of the newest checkpoint, or None.

        Args:
          state, stats: values at the start of the run. The cache is deleted before the restored one takes its memory.

        Raises: UsageError if the checkpoint belongs to another run or does not fit on this mesh.
        """
        args = import_orbax().args
        with guarded_read(self.folder):
            step = self.manager.latest_step()  # from this host's own view of the folder
        hosts.check_same(step, f"newest checkpoints in {self.folder}")
        if step is None:
            return None
        about = self._read(step, about=args.JsonRestore())
        if not isinstance(about, dict) or not isinstance(about.get("run"), dict):
            raise self._broken(step)
        fingerprint.check_run(self.folder, self.about, about["run"])
        if about.get("shapes") != _shapes(state):
            raise UsageError(
                f"the checkpoint in {self.folder} has a batch or cache of other shapes, because its mesh splits the "
                "batch or the heads differently; use the mesh that wrote it, or give another folder"
            )
        text, parts = _split(state, stats)
        saved = self._read(step, text=args.StandardRestore(_abstract(text)))
        tokens, length, done, stats = _unflat(saved, text)
        first, count, ids = gather((state.length, length, tokens))
        if ((count < first) | (count > ids.shape[1])).any() or (ids < 0).any():
            raise self._broken(step)
        if not gather(done).all():
            parts = _abstract(parts), parts
            jax.tree.map(lambda x: x.delete(), state.cache)
            saved = self._read(step, rest=args.StandardRestore(parts[0]))
            cache, draft, control = _unflat(saved, parts[1])
            state = state._replace(cache=cache, draft=draft, control=control)
        return step, state._replace(tokens=tokens, length=length, done=done), stats

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

    def save(self, step: int, state: DecodeState, stats: Stats, *, is_last: bool = False) -> None:
        """Start to write a checkpoint. After the call, the state may be donated.

        Args:
          is_last: True if the run has ended, so that only the text is saved.
        """
        args = import_orbax().args
        text, parts = _split(state, stats)
        about = {"run": self.about, "shapes": _shapes(state)}
        items = {"about": args.JsonSave(about), "text": args.StandardSave(_flat(text))}
        if not is_last:
            items["rest"] = args.StandardSave(_flat(parts))
        with _explained(self.folder):
            self.manager.save(step, args=args.Composite(**items), force=True)

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        with _explained(self.folder):
            self.manager.wait_until_finished()
            self.manager.close()


@contextlib.contextmanager
def _explained(folder):
    """Convert errors of the file system to UsageErrors."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{folder} cannot be written ({reason}); give a writable folder") from error
    except ValueError as error:  # TensorStore reports a full disk in this form
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        reason = os.strerror(int(code[1]))
        raise UsageError(f"{folder} cannot be written ({reason}); free some space, or give another folder") from error


def _make(folder) -> None:
    """Create the folder. If Orbax cannot create it, its threads wait for minutes."""
    with _explained(folder):
        path = _path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if "://" not in _absolute(folder) and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _check_files(folder) -> None:
    """Check that all entries are regular files, since reading a pipe may never end. Raises: UsageError."""
    for parent, _, names in os.walk(_absolute(folder)):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another host may delete files
                check_regular(os.path.join(parent, name))


def _is_free(folder) -> bool:
    """Return True if a folder is empty or contains a checkpoint."""
    names = {path.name for path in _path(folder).iterdir()}
    return not names or bool(names & {"_METADATA", "_CHECKPOINT_METADATA"})


def _path(folder):
    from etils import epath  # installed with Orbax

    return epath.Path(_absolute(folder))


def _split(state: DecodeState, stats: Stats) -> tuple[tuple, tuple]:
    """Return the parts of the result, and the parts that only the next step needs.

    Keys and stop lengths are not saved, because the caller passes them again.
    """
    return (state.tokens, state.length, state.done, stats), (state.cache, state.draft, state.control)


def _shapes(state: DecodeState) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(state)]


def _is_key(x) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _flat(tree: PyTree) -> dict:
    """Flatten a tree to a dict of path -> array with plain dtypes. Orbax rejects custom nodes and empty arrays."""
    leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if x.size]
    plain = {jax.tree_util.keystr(path): jax.random.key_data(x) if _is_key(x) else x for path, x in leaves}
    return plain or {"empty": np.zeros((), np.int32)}


def _abstract(like: PyTree) -> dict:
    """Return the shapes and shardings of `_flat`, from arrays or from shapes."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(like) if x.size}
    shapes = {}
    for name, x in leaves.items():
        data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        shapes[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
    return shapes or {"empty": np.zeros((), np.int32)}


def _unflat(values: Mapping, like: PyTree) -> PyTree:
    """Rebuild a tree like `like` from the dict of `_flat`."""

    def restore_leaf(path, x):
        if not x.size:
            return jnp.zeros(x.shape, x.dtype)
        value = values[jax.tree_util.keystr(path)]
        return jax.random.wrap_key_data(value, impl=_impl(x)) if _is_key(x) else value

    return jax.tree_util.tree_map_with_path(restore_leaf, like)


def _impl(keys):
    """Return `jax.random.key_impl`, which does not accept shapes."""
    impls = []
    jax.eval_shape(lambda x: impls.append(jax.random.key_impl(x)), keys)
    return impls[0]


def _check_shapes(folder, saved: Mapping, expected: Mapping) -> None:
    """Check that a checkpoint has the expected names, shapes and dtypes. Raises: UsageError."""
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved or name not in expected:
            how = "has no" if name in expected else "has the additional"
            raise UsageError(f"the checkpoint in {folder} is of another model: it {how} {name}")
        ours, theirs = (f"{x[name].dtype}{list(x[name].shape)}" for x in (expected, saved))
        if ours != theirs:
            raise UsageError(f"the checkpoint in {folder} is of another model: its {name} is {theirs}, not {ours}")


def _absolute(folder: str | os.PathLike) -> str:
    text = os.fspath(folder)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
