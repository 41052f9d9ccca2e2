"""Writing of heads in the layouts of vllm speculators, of a method's authors and of vLLM's Medusa.

Files that an author pickles are written as safetensors, with the same tensor names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.catalog.schemes import without_scheme
from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.homes import in_home
from specjax.files.untrusted import first_line
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.registry import format_of
from specjax.models.loading.heads.target_fit import TARGET_QUANTIZED, hub_name, target_spec
from specjax.models.storage.format_names import describe_formats
from specjax.types import Target

NUMBER = r"(?<=\.)\d+(?=\.)"
NO_TENSORS = "vocabulary.place", "confidence.temperatures"
"""Parameters that are stored as a map of ids or in config.json."""


def stored_name(table: Mapping[str, str], path: str) -> str:
    """Return the tensor name of a parameter.

    For example, the table entry `layers.*+1.mlp.up_proj.weight` maps `others.0.mlp.up.weight` to `layers.1...`.
    """
    numbers = iter(re.findall(NUMBER, path))
    template = table[re.sub(NUMBER, "*", path)]
    return re.sub(r"\*(\+1)?", lambda star: str(int(next(numbers)) + bool(star[1])), template)


def save_head(
    folder: str | Path, head: DraftHead, *, layout: str | None = None, target: Target | None = None,
    num_tokens: int = 5, target_name: str | None = None,
) -> None:  # fmt: skip
    """Write config.json and model.safetensors into a folder, and replace existing ones.

    Args:
      layout: a layout of the kind, for example "speculators" or "safeailab" for EAGLE-3 (docs/heads.md); None: the
        first one that can represent the head.
      target: the model that the config names as the head's target, with its scheme if it is quantised. num_tokens: the
        draft length that it suggests.
      target_name: a hub id or path by which other engines load the target; None: the target's name.

    Raises: UsageError for a layout that the kind lacks or that cannot represent the head, or a folder that cannot be
      written.
    """
    from safetensors import SafetensorError

    kind, head_format = head.head.kind, format_of(head.head.kind)
    layout, described = check_writable(
        head, layout=layout, target=target, num_tokens=num_tokens, target_name=target_name
    )
    rules = head_format.layouts[layout]
    tensors: dict[str, Any] = {}
    maps: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(head.params)[0]:
        keys = ".".join(str(entry.key) for entry in path)
        if keys == "vocabulary.place":
            maps = _id_maps(np.asarray(value), kind)
        if keys in NO_TENSORS:
            continue
        name = stored_name(head_format.table, keys)
        for pattern, replacement in rules(head.head.config) if callable(rules) else rules:
            name = re.sub(pattern, replacement, name)
        if "#" in name:  # of experts, which have a tensor each
            tensors |= {name.replace("#", str(expert)): part for expert, part in enumerate(value)}
        else:
            tensors[name] = value.reshape(head_format.shapes.get(name, value.shape))
    place = in_home(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_tensors(place / "model.safetensors", tensors | maps)
        (place / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{folder} cannot be written ({why}); choose another folder, or free some space") from error


def check_writable(
    head: DraftHead, *, layout: str | None = None, target: Target | None = None, num_tokens: int = 5,
    target_name: str | None = None,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Return the layout and the config.json that `save_head` writes. Shapes are enough, so call it before training.

    Raises: UsageError like `save_head`.
    """
    head_format = format_of(head.head.kind)
    if layout is not None and layout not in head_format.layouts:
        raise UsageError(f'heads of {head.head.kind} have the layouts {", ".join(head_format.layouts)}, not "{layout}"')
    name = hub_name(without_scheme(target.model.name)) if target is not None else ""
    info = SaveInfo(target_name or name, _architectures(target), num_tokens, head.params)
    layouts = [layout] if layout else list(head_format.layouts)
    layout, described = _describe(head_format, head.head.config, layouts, info)
    scheme = None if target is None else describe_formats(target.model.config)
    return layout, described if scheme is None else described | {TARGET_QUANTIZED: scheme}


def _describe(
    head_format: HeadFormat, config: Any, layouts: Sequence[str], info: SaveInfo
) -> tuple[str, dict[str, Any]]:
    """Return the first layout that can represent a head, and its config.json.

    Raises: UsageError of the first layout, if none can.
    """
    first_error = None
    for layout in layouts:
        try:
            return layout, head_format.describe(config, layout, info)
        except UsageError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _id_maps(place: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """Return the map of a draft vocabulary: differences and flags, or the ids for vLLM's Medusa."""
    size = int(place.max())
    ids = vocabulary.place_ids(place, size)
    if kind == "medusa":
        return {"token_map": ids}
    return {"d2t": ids - np.arange(size), "t2d": place < size}


def _architectures(target: Target | None) -> list[str]:
    if target is None:
        return []
    return [f"{(target_spec(target).family or 'llama').capitalize()}ForCausalLM"]
