"""Which of the target's ids a head drafts: maps of differences (d2t), flags (t2d) and lists (FR-Spec).

A d2t holds for each of the head's own ids what must be added to get the target's; FR-Spec's lists hold the target's ids
themselves, the most frequent first.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.formats import hf
from specjax.models.loading.heads.checkpoint_contents import Tensors
from specjax.models.loading.tensors import torch_file
from specjax.models.loading.tensors.tensors import INTEGERS, read_integers


def drafted_ids(tensors: Tensors, size: int, vocab: int, folder: Path) -> np.ndarray | None:
    """int64[size]: the target's id of each of the head's own; None: they are the same. Uses up the maps.

    Raises: UsageError for a missing map, or one of another size or to ids that there are not.
    """
    deltas, flags = (tensors.pop(name, None) for name in ("d2t", "t2d"))
    if size == vocab:
        return None
    for name, tensor, wanted in (("d2t", deltas, size), ("t2d", flags, vocab)):
        if tensor is not None and (tensor.shape != (wanted,) or tensor.kind not in INTEGERS):
            raise UsageError(
                f"{folder} has a {name} of shape {quote(list(tensor.shape))} and type {tensor.kind}, not of {wanted} "
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
    check_ids(ids, vocab, f"{folder} has a d2t", "a d2t holds differences, lists of ids are given as a token map")
    return ids


def check_ids(ids: np.ndarray, vocab: int, what: str, fix: str = "choose one of this target") -> None:
    """Raises: UsageError for ids beyond the vocabulary, or one that is there twice."""
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab):
        worst = int(ids.max() if ids.max() >= vocab else ids.min())
        raise UsageError(f"{what} that leads to id {worst}, and the target has {vocab}; {fix}")
    known, counts = np.unique(ids, return_counts=True)
    if len(known) < len(ids):
        raise UsageError(f"{what} that leads to id {int(known[np.argmax(counts)])} {int(counts.max())} times")


def read_token_map(source: str | Path, vocab: int) -> np.ndarray:
    """int64[n]: FR-Spec's list of the ids that are drafted, of a file or of "org/name/file.pt" on the hub.

    Raises: UsageError for what is none of this vocabulary.
    """
    file = Path(source).expanduser()
    in_hub = re.fullmatch(r"([\w.-]+/[\w.-]+)/([\w.-]+\.pt)", Path(source).as_posix())
    if in_hub and not file.exists():
        file = hf.download(in_hub[1], (in_hub[2],)) / in_hub[2]
    with guarded_read(file):
        ids = np.asarray(torch_file.read_numbers(file), np.int64)
    if not 0 < len(ids) <= vocab:
        raise UsageError(f"{file} lists {len(ids)} ids, and the target has {vocab}")
    check_ids(ids, vocab, f"{file} has a list")
    return ids


def places(ids: np.ndarray, vocab: int) -> jnp.ndarray:
    """int32[V]: which of the head's own ids each of the target's is; `len(ids)`: none."""
    table = np.full(vocab, len(ids), np.int32)
    table[ids] = np.arange(len(ids))
    return jnp.asarray(table)


def ids_of(place: np.ndarray, size: int) -> np.ndarray:
    """int64[size], of what `places` gives."""
    ids = np.zeros(size, np.int64)
    known = np.flatnonzero(place < size)
    ids[place[known]] = known
    return ids
