"""Heads to files that others serve: the layouts of vllm speculators and of a method's authors, and vLLM's Medusa.

What an author pickles is written as safetensors here, under the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.untrusted import first_line
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.heads import kinds, vocabulary
from specjax.types import Target

NUMBER = r"(?<=\.)\d+(?=\.)"
NO_TENSORS = "vocabulary.place", "confidence.temperatures"
"""Parameters that are made of a map, or of the config."""


def stored_name(table: Mapping[str, str], path: str) -> str:
    """The tensor of a parameter: `others.0.mlp.up.weight` by `layers.*+1.mlp.up_proj.weight` is that of `layers.1`."""
    numbers = iter(re.findall(NUMBER, path))
    template = table[re.sub(NUMBER, "*", path)]
    return re.sub(r"\*(\+1)?", lambda star: str(int(next(numbers)) + bool(star[1])), template)


def save_head(
    folder: str | Path, head: DraftHead, *, layout: str | None = None, target: Target | None = None, num_tokens: int = 5
) -> None:
    """Write config.json and model.safetensors, over those that are there.

    Args:
      layout: one of those that the kind has, "speculators" or "safeailab" for EAGLE-3 (docs/heads.md); None: the first
        of them that has words for the head.
      target: what the config names as the model that it drafts for. num_tokens: how many it suggests to draft.

    Raises: UsageError for a layout that the kind does not have or that has no words for the head, or a folder that
      cannot be written.
    """
    from safetensors import SafetensorError

    name, kind, config = head.head.kind, kinds.of(head.head.kind), head.head.config
    layout, described = check_writable(head, layout=layout, target=target, num_tokens=num_tokens)
    rules = kind.LAYOUTS[layout]
    tensors, maps = {}, {}
    for path, value in jax.tree_util.tree_flatten_with_path(head.params)[0]:
        keys = ".".join(str(entry.key) for entry in path)
        if keys == "vocabulary.place":
            maps = _maps(np.asarray(value), name)
        if keys in NO_TENSORS:
            continue
        stored = stored_name(kind.TABLE, keys)
        for pattern, replacement in rules(config) if callable(rules) else rules:
            stored = re.sub(pattern, replacement, stored)
        tensors[stored] = value.reshape(getattr(kind, "SHAPES", {}).get(stored, value.shape))
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_tensors(place / "model.safetensors", tensors | maps)
        (place / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{folder} cannot be written ({why}); give another folder, or make room") from error


def check_writable(
    head: DraftHead, *, layout: str | None = None, target: Target | None = None, num_tokens: int = 5
) -> tuple[str, dict[str, Any]]:
    """(layout, config.json) that `save_head` writes of a head, of which shapes are enough: before it is trained.

    Raises: UsageError as `save_head`.
    """
    kind = kinds.of(head.head.kind)
    if layout is not None and layout not in kind.LAYOUTS:
        raise UsageError(f'heads of {head.head.kind} have the layouts {", ".join(kind.LAYOUTS)}, not "{layout}"')
    of = target.model.name if target is not None else ""
    about = {"name": of, "architectures": _architectures(target), "num_tokens": num_tokens, "params": head.params}
    return _described(kind, head.head.config, [layout] if layout else list(kind.LAYOUTS), about)


def _described(
    kind: ModuleType, config: Any, layouts: Sequence[str], about: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The first of the layouts that has words for a head, and its config.json. Raises: UsageError, the first one's."""
    refused = None
    for layout in layouts:
        try:
            return layout, kind.describe(config, layout, about)
        except UsageError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _maps(place: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """The map of a trimmed vocabulary: differences and flags, or for vLLM's Medusa the ids."""
    size = int(place.max())
    ids = vocabulary.ids_of(place, size)
    if kind == "medusa":
        return {"token_map": ids}
    return {"d2t": ids - np.arange(size), "t2d": place < size}


def _architectures(target: Target | None) -> list[str]:
    from specjax.models.loading.heads.checkpoint_contents import reader_of

    if target is None:
        return []
    return [f"{(reader_of(target).family or 'llama').capitalize()}ForCausalLM"]
