"""Parameters and running decodes on disk, by Orbax: saved on one mesh, restored on another.

Orbax writes to a temporary folder and renames it when all hosts are done, so a checkpoint is whole or not there. On
several hosts the folder must be one that all of them see, such as a bucket; every host must make the same calls.
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
    """Where `stream` keeps its state, and after how many steps.

    A run that finds its own checkpoint there continues from it. A state holds the cache: think of its size.
    """

    folder: str | os.PathLike
    every: int = 64


def save(folder: str | os.PathLike, tree: PyTree) -> None:
    """Write arrays, such as `target.params`, sharded or not; a checkpoint in the folder is replaced.

    Typed keys are written as their data.

    Raises: UsageError if the folder cannot be written, or holds something else than a checkpoint.
    """
    ocp = import_orbax()
    _make(folder)
    free = _is_free(folder)
    hosts.check_same(free, f"contents of {folder}")  # nobody replaces it before all have looked
    if not free:
        raise UsageError(f"{folder} holds something else than a checkpoint, which would be deleted; give a new folder")
    with _explained(folder), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_absolute(folder), _flat(tree), force=True)


def restore(folder: str | os.PathLike, like: PyTree) -> PyTree:
    """Read what `save` wrote.

    Args:
      like: a tree of the same structure, of arrays or of `jax.ShapeDtypeStruct`s with shardings (such as the parameters
        of `abstract_target`), which say where to put the parts. The mesh may be another one than that of `save`.

    Raises: UsageError if there is no checkpoint, or its arrays are others.
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
                found = checkpointer.restore(_absolute(folder), _abstract(like))
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"there is no checkpoint in {folder}; check the path, which save wrote") from None
        return _unflat(found, like)


class Running:
    """The checkpoints of one `stream`: the newest is read once, later ones are written while the steps go on."""

    def __init__(self, checkpoints: Checkpoints, about: Mapping[str, str]):
        if checkpoints.every < 1:
            raise UsageError(f"a checkpoint can be written every 1 step or more, not every {checkpoints.every}")
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
        """(steps done, state, sums) of the newest checkpoint; None: there is none.

        Args: state, stats: as at the start of the run; the cache is freed and its place taken by the restored one.
        Raises: UsageError if the checkpoint belongs to another run or does not fit on this mesh.
        """
        args = import_orbax().args
        with guarded_read(self.folder):
            step = self.manager.latest_step()  # from this host's own listing of the folder
        hosts.check_same(step, f"newest checkpoints in {self.folder}")
        if step is None:
            return None
        about = self._read(step, about=args.JsonRestore())
        if not isinstance(about, dict) or not isinstance(about.get("run"), dict):
            raise self._broken(step)
        fingerprint.check_run(self.folder, self.about, about["run"])
        if about.get("shapes") != _shapes(state):
            raise UsageError(
                f"the checkpoint in {self.folder} is of a batch or cache of other shapes, as meshes that split the "
                "batch or the heads in other ways make them; use the mesh it was written on, or another folder"
            )
        text, rest = _parts(state, stats)
        found = self._read(step, text=args.StandardRestore(_abstract(text)))
        tokens, length, done, stats = _unflat(found, text)
        begun, now, ids = gather((state.length, length, tokens))
        if ((now < begun) | (now > ids.shape[1])).any() or (ids < 0).any():
            raise self._broken(step)
        if not gather(done).all():
            rest = _abstract(rest), rest
            jax.tree.map(lambda x: x.delete(), state.cache)
            found = self._read(step, rest=args.StandardRestore(rest[0]))
            cache, draft, control = _unflat(found, rest[1])
            state = state._replace(cache=cache, draft=draft, control=control)
        return step, state._replace(tokens=tokens, length=length, done=done), stats

    def _read(self, step: int, **item):
        [name] = item
        try:
            return self.manager.restore(step, args=import_orbax().args.Composite(**item))[name]
        except Exception as error:  # of Orbax, of TensorStore below it, of their reading of JSON
            raise self._broken(step) from error

    def _broken(self, step: int) -> UsageError:
        return UsageError(
            f"step {step} in {self.folder} is not a whole checkpoint of stream; remove that step, or give another "
            "folder"
        )

    def save(self, step: int, state: DecodeState, stats: Stats, *, over: bool = False) -> None:
        """Begin to write; when it returns, the state may be donated. `over`: only the text is still needed."""
        args = import_orbax().args
        text, rest = _parts(state, stats)
        about = {"run": self.about, "shapes": _shapes(state)}
        items = {"about": args.JsonSave(about), "text": args.StandardSave(_flat(text))}
        if not over:
            items["rest"] = args.StandardSave(_flat(rest))
        with _explained(self.folder):
            self.manager.save(step, args=args.Composite(**items), force=True)

    def close(self) -> None:
        """Wait until all is written."""
        with _explained(self.folder):
            self.manager.wait_until_finished()
            self.manager.close()


@contextlib.contextmanager
def _explained(folder):
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{folder} cannot be written ({reason}); give a folder that can be") from error
    except ValueError as error:  # as TensorStore tells of a full disk
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        reason = os.strerror(int(code[1]))
        raise UsageError(f"{folder} cannot be written ({reason}); make room, or give another folder") from error


def _make(folder) -> None:
    """Before Orbax does, whose threads would wait for minutes for a folder that they could not make."""
    with _explained(folder):
        path = _path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if "://" not in _absolute(folder) and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _check_files(folder) -> None:
    """Raises: UsageError for what would be waited for without end, a pipe in place of a file."""
    for parent, _, names in os.walk(_absolute(folder)):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another host tidies up
                check_regular(os.path.join(parent, name))


def _is_free(folder) -> bool:
    """Whether a folder is empty, or a checkpoint."""
    names = {path.name for path in _path(folder).iterdir()}
    return not names or bool(names & {"_METADATA", "_CHECKPOINT_METADATA"})


def _path(folder):
    from etils import epath  # with Orbax

    return epath.Path(_absolute(folder))


def _parts(state: DecodeState, stats: Stats) -> tuple[tuple, tuple]:
    """What the result needs, and what only the next step does; keys and stops are the caller's."""
    return (state.tokens, state.length, state.done, stats), (state.cache, state.draft, state.control)


def _shapes(state: DecodeState) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(state)]


def _is_key(x) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _flat(tree: PyTree) -> dict:
    """Path -> array without a type of its own: any tree, as Orbax knows it, which takes no empty arrays."""
    leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if x.size]
    plain = {jax.tree_util.keystr(path): jax.random.key_data(x) if _is_key(x) else x for path, x in leaves}
    return plain or {"empty": np.zeros((), np.int32)}


def _abstract(like: PyTree) -> dict:
    """`_flat` of arrays or shapes, as shapes with their places."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(like) if x.size}
    shapes = {}
    for name, x in leaves.items():
        data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        shapes[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
    return shapes or {"empty": np.zeros((), np.int32)}


def _unflat(found: Mapping, like: PyTree) -> PyTree:
    def one(path, x):
        if not x.size:
            return jnp.zeros(x.shape, x.dtype)
        value = found[jax.tree_util.keystr(path)]
        return jax.random.wrap_key_data(value, impl=_impl(x)) if _is_key(x) else value

    return jax.tree_util.tree_map_with_path(one, like)


def _impl(keys):
    """`jax.random.key_impl`, for shapes too."""
    found = []
    jax.eval_shape(lambda x: found.append(jax.random.key_impl(x)), keys)
    return found[0]


def _check_shapes(folder, saved: Mapping, wanted: Mapping) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved or name not in wanted:
            how = "has no" if name in wanted else "alone has a"
            raise UsageError(f"the checkpoint in {folder} is of another model: it {how} {name}")
        ours, theirs = (f"{x[name].dtype}{list(x[name].shape)}" for x in (wanted, saved))
        if ours != theirs:
            raise UsageError(f"the checkpoint in {folder} is of another model: {name} is {theirs} there, not {ours}")


def _absolute(folder: str | os.PathLike) -> str:
    text = os.fspath(folder)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
