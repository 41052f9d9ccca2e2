"""Learned heads from everybody's checkpoints: `load_head("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", target)`.

A head is recognised by what its config says and what its tensors are called. Since verification is exact, a head that
is misread changes no text and is only slow: so every tensor that is missing or of no use is named, and
`specjax.models.heads.agreement` compares what the head says with what the target does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.models.loading.formats import hf, maxtext
from specjax.models.loading.heads import kinds, shipped, vocabulary
from specjax.models.loading.heads.checkpoint_contents import (
    Plan,
    check_family,
    config_file,
    read_contents,
    reader_of,
    trained_for,
)
from specjax.models.loading.heads.writing import save_head, stored_name
from specjax.models.loading.tensors.assembly import Leaf, Stored, fill, insert, refuse
from specjax.types import PyTree, Target

__all__ = ["LoadedHead", "load_head", "read_head", "recognise", "save_head"]


class LoadedHead(NamedTuple):
    """A head, and how it was read."""

    head: DraftHead
    dialect: str
    flags: Mapping[str, Any]  # what it was taken to be
    notes: tuple[str, ...]  # what had to be assumed
    tensors: int  # how many the files have
    unused: tuple[str, ...]  # those of no use here
    trained_for: str | None  # the target, if its files name one
    max_positions: int | None  # of a text, as its files say

    @property
    def kind(self) -> str:
        return self.head.head.kind

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.head.params) if jnp.issubdtype(x.dtype, jnp.floating))


def load_head(source: str | Path, target: Target, *, token_map: str | Path | None = None) -> DraftHead:
    """A learned head of `target`, in the target's dtype.

    Args:
      source: a hub id, one of those that come with specjax (`shipped.NAMES`), or a folder with config.json and the
        weights, as safetensors or as PyTorch saved them (a pickle may hold tensors and nothing else). Whose heads are
        read: docs/heads.md.
      token_map: FR-Spec's list of the ids to draft, for an EAGLE head that drafts all of them: a .pt file, or
        "org/name/file.pt" on the hub.

    Raises: UsageError, in one sentence, for everything that can be wrong with it or does not fit the target.
    """
    return read_head(source, target, token_map=token_map).head


def read_head(source: str | Path, target: Target, *, token_map: str | Path | np.ndarray | None = None) -> LoadedHead:
    """As `load_head`, with how it was read. token_map: or its ids, as `vocabulary.read_token_map` gives them."""
    path, reader = resolve(source), reader_of(target)
    with guarded_read(path):
        contents = read_contents(path)
        found = kinds.find(contents)
        if found is None:
            raise UsageError(f"{path} is no learned head of a known kind; a whole draft model is loaded with load")
        check_family(contents, reader)
        kind, dialect = found
        ids = token_map
        if isinstance(ids, str | Path):
            ids = vocabulary.read_token_map(ids, reader.vocab_size)
        plan = kind.plan(contents, dialect, reader, ids)
        leaves, unused = _leaves(plan, path)
    head = DraftHead(KINDS[plan.kind].head(plan.config), _assemble(plan, leaves))
    layer = getattr(plan.config, "layer", None)
    return LoadedHead(
        head, dialect, plan.flags, plan.notes, len(contents.tensors), unused, trained_for(contents),
        layer and layer.max_positions,
    )  # fmt: skip


def recognise(source: str | Path) -> tuple[str, str] | None:
    """The kind and the dialect of a head; None: it is a whole model, or nothing that could be read."""
    path = Path(source).expanduser()
    if source not in shipped.NAMES and not path.is_dir() and (path.exists() or not _is_id(source)):
        return None
    path = resolve(source)
    if not config_file(path).exists() or maxtext.find(path) is not None:
        return None
    with guarded_read(path):
        contents = read_contents(path)
        found = kinds.find(contents)
        return None if found is None else (found[0].kind_of(contents), found[1])


def resolve(source: str | Path) -> Path:
    """The local folder. Raises: UsageError if there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if source in shipped.NAMES:
        return shipped.folder(str(source))
    if path.exists() or not _is_id(source):
        raise UsageError(f'there is no folder "{source}", and it is not a hub id like "org/name" either')
    folder = hf.download(str(source))
    return folder if any(folder.glob(f"*{hf.SAFETENSORS}")) else hf.download(str(source), (*hf.WANTED, *hf.TORCHS))


def _is_id(source: str | Path) -> bool:
    return isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None


def _leaves(plan: Plan, path: Path) -> tuple[list[Leaf], tuple[str, ...]]:
    """The parameters that are tensors of the file, and the names of what is none.

    Raises: UsageError that lists every tensor that is missing, superfluous or wrongly shaped.
    """
    tensors, leaves, missing, wrong, used = plan.tensors, [], [], [], set()
    for keys, struct in _parameters(plan):
        name = ".".join(map(str, keys))
        if name in plan.arrays:
            continue
        stored = stored_name(plan.table, name)
        used.add(stored)
        if stored not in tensors:
            missing.append(stored)
        elif tensors[stored].shape != struct.shape:
            own = tensors.own[stored]
            wrong.append(f"{own} is {quote(list(tensors[stored].shape))}, not {list(struct.shape)}")
        else:
            leaves.append(Leaf(keys, struct.shape, struct.dtype, (Stored(stored),), stacked=False))
    extra = sorted(tensors.own[name] for name in tensors if name not in used)
    unused = tuple(name for name in extra if any(re.match(pattern, name) for pattern in plan.unused))
    refuse(path, missing, wrong, [name for name in extra if name not in unused])
    return leaves, unused


def _parameters(plan: Plan) -> list[tuple[tuple, Any]]:
    """(keys, shape and dtype) of each."""
    flat = jax.tree_util.tree_flatten_with_path(abstract_head(plan.kind, plan.config).params)[0]
    return [(tuple(entry.key for entry in path), struct) for path, struct in flat]


def _assemble(plan: Plan, leaves: list[Leaf]) -> PyTree:
    params: dict = {}
    with ThreadPoolExecutor() as pool:
        read = {leaf.keys: fill(leaf, plan.tensors, pool) for leaf in leaves}
    for keys, struct in _parameters(plan):
        given = plan.arrays.get(".".join(map(str, keys)))
        insert(params, keys, read[keys] if given is None else jnp.asarray(given, struct.dtype))
    return params
