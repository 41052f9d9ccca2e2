"""Checkpoints of parameters, written by Orbax. They can be restored on another mesh.

Orbax writes to a temporary folder and renames it when all hosts are done, so a checkpoint is complete or absent. On
several hosts, the folder must be visible to all of them, such as a bucket. Every host must make the same calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, import_orbax, parse_json
from specjax.parallel import hosts
from specjax.persistence.folders import absolute, check_files, guarded_write, make_folder, path_of
from specjax.persistence.named_arrays import abstract, flat, unflat
from specjax.types import PyTree

WRITER = {"written_by": "specjax"}
"""The mark of a checkpoint that `save` may replace."""
METADATA = "_CHECKPOINT_METADATA"
OWN_FILE = re.compile(
    rf"{METADATA}|_METADATA|_sharding|array_metadatas|d|manifest\.ocdbt|ocdbt\.process_\d+|commit_success\.txt"
)
"""Names of the entries of a checkpoint. `save` does not replace a folder with other entries."""


class Checkpoints(NamedTuple):
    """Folder in which `stream` saves its state every `every` steps.

    A run that finds its own checkpoint in the folder continues from it. A state includes the cache, so it can be large.
    """

    folder: str | os.PathLike
    every: int = 64


def save(folder: str | os.PathLike, tree: PyTree) -> None:
    """Save a tree of arrays, such as `target.params`, sharded or not. An old checkpoint in the folder is replaced.

    Typed keys are saved as their data.

    Raises: UsageError if the folder cannot be written, or contains files that `save` did not write.
    """
    ocp = import_orbax()
    make_folder(folder)
    free = _is_free(folder)
    hosts.check_same(free, f"contents of {folder}")  # no host replaces the folder before all hosts have checked it
    if not free:
        raise UsageError(f"{folder} contains other files than a checkpoint, which would be deleted; give a new folder")
    with guarded_write(folder), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(absolute(folder), flat(tree), force=True, custom_metadata=WRITER)


def restore(folder: str | os.PathLike, like: PyTree) -> PyTree:
    """Restore a tree that `save` wrote.

    Args:
      like: a tree of the same structure, of arrays or of `jax.ShapeDtypeStruct`s, such as the parameters of
        `abstract_target`. Its shardings place the restored arrays. The mesh may differ from that of `save`.

    Raises: UsageError if there is no checkpoint, or if its arrays have other names, shapes or dtypes.
    """
    ocp = import_orbax()
    check_files(folder)
    with guarded_read(folder):
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                metadata = checkpointer.metadata(absolute(folder)).item_metadata
                if metadata is None:
                    raise FileNotFoundError
                _check_shapes(folder, dict(metadata), abstract(like))
                restored = checkpointer.restore(absolute(folder), abstract(like))
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"there is no checkpoint in {folder}; give the path that was passed to save") from None
        return unflat(restored, like)


def _is_free(folder) -> bool:
    """Return True if a folder is empty or contains a checkpoint of `save`, and nothing else."""
    path = path_of(folder)
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return True
    if METADATA not in names or not all(map(OWN_FILE.fullmatch, names)):
        return False
    check_files(folder)
    try:
        document = parse_json((path / METADATA).read_bytes(), path)
    except (OSError, UsageError):
        return False
    return isinstance(document, dict) and document.get("custom_metadata") == WRITER


def _check_shapes(folder, saved: Mapping, expected: Mapping) -> None:
    """Check that a checkpoint has the expected names, shapes and dtypes. Raises: UsageError."""
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved or name not in expected:
            how = "has no" if name in expected else "has the additional"
            raise UsageError(f"the checkpoint in {folder} is of another model: it {how} {name}")
        ours, theirs = (f"{x[name].dtype}{list(x[name].shape)}" for x in (expected, saved))
        if ours != theirs:
            raise UsageError(f"the checkpoint in {folder} is of another model: its {name} is {theirs}, not {ours}")
