"""Draft vocabularies: maps from a head's own ids to the target's, as differences (d2t), flags (t2d) or lists (FR-Spec).

A d2t has, for each of the head's own ids, the number to add to get the target's id. FR-Spec's lists have the target's
ids themselves, the most frequent first.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.formats import hf
from specjax.models.loading.heads.checkpoint_contents import Tensors
from specjax.models.loading.tensors import torch_file
from specjax.models.loading.tensors.tensors import INTEGERS, read_integers


def take_drafted_ids(tensors: Tensors, size: int, vocab: int, folder: Path) -> np.ndarray | None:
    """Return the target's ids int64[size] of the head's own ids, or None if both are the same.

    The maps are removed from `tensors`.

    Raises: UsageError for a missing map, a map of another size, or ids outside of the vocabulary.
    """
    deltas, flags = (tensors.pop(name, None) for name in ("d2t", "t2d"))
    if size == vocab:
        return None
    for name, tensor, length in (("d2t", deltas, size), ("t2d", flags, vocab)):
        if tensor is not None and (tensor.shape != (length,) or tensor.kind not in INTEGERS):
            raise UsageError(
                f"{folder} has a {name} of shape {quote(list(tensor.shape))} and type {tensor.kind}, not of {length} "
                "whole numbers"
            )
    if deltas is not None:
        ids = np.arange(size) + read_integers(deltas)
    elif flags is not None:
        ids = np.flatnonzero(read_integers(flags))
        if len(ids) != size:
            raise UsageError(f"{folder} has a t2d that names {len(ids)} ids, and the head drafts {size}")
    else:
        raise UsageError(
            f"{folder} drafts {size} of the target's {vocab} ids and has no map of them, d2t or t2d; save it with its "
            "map"
        )
    check_ids(ids, vocab, f"{folder} has a d2t", "a d2t has differences; give a list of ids as a token map")
    return ids


def check_ids(ids: np.ndarray, vocab: int, where: str, fix: str = "choose one of this target") -> None:
    """Raise a UsageError for ids outside of the vocabulary, or repeated ones. where: the beginning of the error."""
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab):
        worst = int(ids.max() if ids.max() >= vocab else ids.min())
        raise UsageError(f"{where} that leads to id {worst}, and the target has {vocab}; {fix}")
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        raise UsageError(f"{where} that leads to id {int(unique[np.argmax(counts)])} {int(counts.max())} times")


def read_token_map(source: str | Path, vocab: int) -> np.ndarray:
    """Read FR-Spec's list of drafted ids int64[n] from a file, or from "org/name/file.pt" on the hub.

    Raises: UsageError for a file without such a list, or ids outside of the vocabulary.
    """
    file = in_home(source)
    in_hub = re.fullmatch(r"([\w.-]+/[\w.-]+)/([\w.-]+\.pt)", Path(source).as_posix())
    if in_hub and not file.exists():
        file = hf.download(in_hub[1], (in_hub[2],)) / in_hub[2]
    with guarded_read(file):
        ids = np.asarray(torch_file.read_numbers(file), np.int64)
    if not 0 < len(ids) <= vocab:
        raise UsageError(f"{file} lists {len(ids)} ids, and the target has {vocab}")
    check_ids(ids, vocab, f"{file} has a list")
    return ids


def place_table(ids: np.ndarray, vocab: int) -> jnp.ndarray:
    """Return the head's own id of each of the target's ids as int32[V]; `len(ids)`: the head cannot draft it."""
    table = np.full(vocab, len(ids), np.int32)
    table[ids] = np.arange(len(ids))
    return jnp.asarray(table)


def place_ids(place: np.ndarray, size: int) -> np.ndarray:
    """Return the target's ids int64[size] from the result of `place_table`."""
    ids = np.zeros(size, np.int64)
    drafted = np.flatnonzero(place < size)
    ids[place[drafted]] = drafted
    return ids
