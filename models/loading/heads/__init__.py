"""Draft heads from published checkpoints: `load_head("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", target)`.

The format of a head is detected from its config and the names of its tensors. A head that is read wrongly changes no
text, since verification is exact; it is only slow. So errors list every tensor that is missing or not used, and
`specjax.models.heads.agreement` compares the head's drafts with the target's tokens.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.catalog.defaults import NATIVE
from specjax.errors import CheckpointWarning, UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.models.loading.families.unread_fields import describe_unread
from specjax.models.loading.formats import ctranslate2, hf, maxtext
from specjax.models.loading.heads import mtp, registry, shipped, vocabulary
from specjax.models.loading.heads.checkpoint_contents import MASK_FILE, HeadPlan, config_file, read_contents
from specjax.models.loading.heads.format import NEUTRAL
from specjax.models.loading.heads.settings import by_own_names, names_of, override
from specjax.models.loading.heads.target_fit import (
    check_family,
    describe_other_scheme,
    target_spec,
    trained_target,
)
from specjax.models.loading.heads.writing import save_head, stored_name
from specjax.models.loading.tensors.assembly import Parameter, Part, fill, insert, refuse_tensors
from specjax.models.storage import is_of_experts
from specjax.types import PyTree, Target

__all__ = ["LoadedHead", "load_head", "read_head", "recognise", "save_head"]


class LoadedHead(NamedTuple):
    """A head, and facts about its files."""

    head: DraftHead
    dialect: str
    flags: Mapping[str, Any]  # detected properties
    notes: tuple[str, ...]  # assumptions that were necessary
    unread: tuple[str, ...]  # a sentence with the fields of its config that are not read, if there are any
    tensors: int  # number of tensors in the files
    unused: tuple[str, ...]  # tensors that are not used
    trained_for: str | None  # the target, if its files name one
    max_positions: int | None  # longest text, as its files state
    assumed: tuple[str, ...] = ()  # settings that its files leave open
    other_scheme: str | None = None  # a sentence, if it was trained on its target in another scheme

    @property
    def kind(self) -> str:
        return self.head.head.kind

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return sentences about facts that can change its drafts."""
        return self.unread if self.other_scheme is None else (*self.unread, self.other_scheme)

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.head.params) if jnp.issubdtype(x.dtype, jnp.floating))


def load_head(
    source: str | Path,
    target: Target,
    *,
    token_map: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> DraftHead:
    """Load a draft head of `target` in the target's dtype.

    Args:
      source: a hub id, the name of a head that comes with specjax (`shipped.NAMES`), or a folder. A folder has
        config.json and weights in safetensors or PyTorch files; a pickle may contain tensors only. docs/heads.md lists
        the formats. "native" is the multi-token-prediction module in the files of the target.
      token_map: FR-Spec's list of the ids to draft, for an EAGLE head that drafts all ids: a .pt file, or
        "org/name/file.pt" on the hub.
      settings: what the files do not state or state wrongly, for example `{"from_anchor": True}`. `specjax inspect`
        shows the settings of a head.
      tokenizer: the target's, whose mask token counts if the files name none.

    Warns: CheckpointWarning that names the fields of its config that are not read and can change its drafts, and one
      for a head that was trained on its target in another scheme of quantisation.

    Raises: UsageError for files that are missing, broken or do not fit the target, or for settings that the head lacks.
    """
    loaded = read_head(source, target, token_map=token_map, settings=settings, tokenizer=tokenizer)
    for note in loaded.warnings:
        warnings.warn(note, CheckpointWarning, stacklevel=2)
    return loaded.head


def read_head(
    source: str | Path,
    target: Target,
    *,
    token_map: str | Path | np.ndarray | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> LoadedHead:
    """Load a head like `load_head`, and report facts about its files. token_map: also an array of ids."""
    spec, native = target_spec(target), mtp.native_module(target) if source == NATIVE else None
    path = resolve(source) if native is None else Path(native.source)
    with guarded_read(path):
        if native is None:
            contents = read_contents(path)
            match = registry.find_format(contents)
        else:
            contents = mtp.native_contents(native, spec.num_layers)
            match = mtp.FORMAT, native.dialect
        if match is None:
            raise UsageError(f"{path} is not a draft head of a known kind; load a whole draft model with load()")
        # What the search for the format looked at is not read yet.
        contents = contents._replace(config=contents.config.unrecorded())
        check_family(contents, spec)
        head_format, dialect = match
        if token_map is not None and not head_format.takes_token_map:
            raise UsageError(f"{path} is a {head_format.kinds[0]} head, which takes no token map; leave it out")
        ids = vocabulary.read_token_map(token_map, spec.vocab_size) if isinstance(token_map, str | Path) else token_map
        changes = by_own_names(settings or {}, head_format.spellings)
        contents = contents._replace(token_map=ids, changes=changes, tokenizer=tokenizer)
        plan = _overridden(head_format.plan(contents, dialect, spec), changes, spec.num_layers)
        leaves, unused = _leaves(plan, path)
    head = DraftHead(KINDS[plan.kind].head(plan.config), _assemble(plan, leaves))
    layer, trained_for = getattr(plan.config, "layer", None), trained_target(contents)
    other_scheme = describe_other_scheme(contents, target)
    # The reader of a target has reported the fields of its config already.
    unread = () if native else describe_unread(contents.config, {**NEUTRAL, **head_format.neutral})
    return LoadedHead(
        head, dialect, plan.flags, plan.notes, unread, len(contents.tensors), unused, trained_for,
        layer and layer.max_positions, plan.assumed, other_scheme,
    )  # fmt: skip


def _overridden(plan: HeadPlan, changes: Mapping[str, Any], num_layers: int) -> HeadPlan:
    """Return a plan with other settings. Raises: UsageError for settings that the head lacks."""
    if not changes:
        return plan
    names = names_of(plan.config, plan.flags)
    config = override(plan.kind, plan.config, changes, names, num_layers)
    flags = {name: getattr(config, name, value) for name, value in plan.flags.items()}
    return plan._replace(config=config, flags=flags, assumed=tuple(x for x in plan.assumed if x not in changes))


def recognise(source: str | Path) -> tuple[str, str] | None:
    """Return the kind and the dialect of a head, or None for a whole model or a path that cannot be read."""
    path = in_home(source)
    if source not in shipped.NAMES and not path.is_dir() and (path.exists() or not _is_id(source)):
        return None
    path = resolve(source)
    if not config_file(path).exists() or maxtext.find_orbax_folder(path) is not None or ctranslate2.is_folder(path):
        return None
    with guarded_read(path):
        contents = read_contents(path)
        match = registry.find_format(contents)
    if match is None:
        return None
    head_format, dialect = match
    return (head_format.kinds[0] if head_format.kind_of is None else head_format.kind_of(contents)), dialect


def resolve(source: str | Path) -> Path:
    """Return the local folder of a head. Raises: UsageError if there is none."""
    path = in_home(source)
    if path.is_dir():
        return path
    if source in shipped.NAMES:
        return shipped.find_folder(str(source))
    if path.exists() or not _is_id(source):
        raise UsageError(f'there is no folder "{source}", and it is not a hub id like "org/name" either')
    folder = hf.download(str(source), (*hf.DOWNLOADED_FILES, MASK_FILE))
    return (
        folder
        if any(folder.glob(f"*{hf.SAFETENSORS_SUFFIX}"))
        else hf.download(str(source), (*hf.DOWNLOADED_FILES, *hf.TORCH_FILES))
    )


def _is_id(source: str | Path) -> bool:
    return isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None


def _leaves(plan: HeadPlan, path: Path) -> tuple[list[Parameter], tuple[str, ...]]:
    """Return the parameters that are read from tensors, and the names of the tensors that are not used.

    Raises: UsageError that lists every tensor that is missing, unknown or has a wrong shape.
    """
    tensors, leaves, missing, wrong, used = plan.tensors, [], [], [], set()
    for keys, struct in _parameters(plan):
        name = ".".join(map(str, keys))
        if name in plan.arrays:
            continue
        parts = _parts(plan, keys, struct.shape)
        for part, shape in parts:
            stored = part.stored.name
            used.add(stored)
            if stored not in tensors:
                missing.append(tensors.missing_name(stored))
            elif tensors[stored].shape != shape:
                wrong.append(f"{tensors.file_names[stored]} is {quote(list(tensors[stored].shape))}, not {list(shape)}")
        leaves.append(
            Parameter(keys, struct.shape, struct.dtype, tuple(part for part, _ in parts), int(is_of_experts(keys)))
        )
    extra = sorted(tensors.file_names[name] for name in tensors if name not in used)
    unused = tuple(name for name in extra if any(re.match(pattern, name) for pattern in plan.unused))
    refuse_tensors(path, missing, wrong, [name for name in extra if name not in unused])
    return leaves, unused


def _parts(plan: HeadPlan, keys: tuple, shape: tuple[int, ...]) -> list[tuple[Part, tuple[int, ...]]]:
    """Return the stored tensors of a parameter, one or one per expert, and the shape of each in the file."""
    num_experts = shape[0] if is_of_experts(keys) else 0
    rows, *columns = shape[num_experts > 0 :]
    parts = []
    for expert in range(num_experts or 1):
        stored = plan.stored(stored_name(plan.table, ".".join(map(str, keys))))
        stored = stored._replace(name=stored.name.replace("#", str(expert)), expert=expert if stored.stacked else None)
        at = (expert,) * (num_experts > 0)
        parts.append((Part(stored, at), stored.shape_in_file(rows, columns, num_experts)))
    return parts


def _parameters(plan: HeadPlan) -> list[tuple[tuple, Any]]:
    """Return the keys and the shape of each parameter."""
    flat = jax.tree_util.tree_flatten_with_path(abstract_head(plan.kind, plan.config).params)[0]
    return [(tuple(entry.key for entry in path), struct) for path, struct in flat]


def _assemble(plan: HeadPlan, leaves: list[Parameter]) -> PyTree:
    params: dict = {}
    with ThreadPoolExecutor() as pool:
        read = {leaf.keys: fill(leaf, plan.tensors, pool) for leaf in leaves}
    for keys, struct in _parameters(plan):
        array = plan.arrays.get(".".join(map(str, keys)))
        array = array(plan.config) if callable(array) else array
        insert(params, keys, read[keys] if array is None else jnp.asarray(array, struct.dtype))
    return params
