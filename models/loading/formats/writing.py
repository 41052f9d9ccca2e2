"""A whole model to a Hugging Face folder, by the tables that it is read by: what is written is what `load` reads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.untrusted import first_line, read_json_object
from specjax.models.bridge import CONFIGS, Config, has_repeated_heads
from specjax.models.loading.families import registry
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.assembly import Checkpoint, list_parameters
from specjax.models.loading.tokenizers import writing
from specjax.models.loading.tokenizers.tokenizer import Tokenizer
from specjax.types import Target

TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
    "generation_config.json",
)  # fmt: skip
"""Files of a folder that are of its tokenizer, or say how a text ends."""

IDS = "bos_token_id", "eos_token_id", "pad_token_id"
LAID_OUT = "stacked", "cache_dtype", "cache_lanes", "cache_bits", "same_bits", "name"
"""Of a config what is of the process that runs the model, and stands in no file."""


def save_model(folder: str | Path, target: Target, tokenizer: Tokenizer | str | Path | None = None) -> None:
    """Write config.json, model.safetensors and a tokenizer, over those that are there: what `load`, and others, read.

    To the bit, but for Gemma's norms, whose files hold w - 1: of a w below 0.5 the last bits may change.

    Args:
      target: of `specjax.models`, in its dtype.
      tokenizer: what `load` gave beside the model, or a model folder, whose files are copied; None: write none.

    Raises: UsageError for a model that is not of `specjax.models`, that lies over a mesh in other shapes or that no
      config.json describes, or a folder that cannot be written.
    """
    from safetensors import SafetensorError

    described = check_model_writable(target)
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_tensors(place / hf.SAFETENSORS_FILE, _tensors(target))
        if isinstance(tokenizer, Tokenizer):
            described |= writing.write_tokenizer(place, tokenizer)
        elif tokenizer is not None:
            described |= _copied(Path(tokenizer), place)
        (place / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{folder} cannot be written ({why}); give another folder, or make room") from error


def check_model_writable(target: Target) -> dict[str, Any]:
    """The config.json that `save_model` writes, of a model of which shapes are enough. Raises: UsageError as that."""
    config: Any = target.model.config
    if type(config) not in CONFIGS:
        raise UsageError(f"{target.model.name} has no config of specjax.models, so no config.json describes it")
    if has_repeated_heads(config, target.params):
        raise UsageError(
            f"{target.model.name} lies over a mesh that repeats some of its heads; write it from one device"
        )
    described = registry.by_config(config).config_to_hf(config)
    told = hf.parse_config(described, config.name, dtype=config.dtype)[0]
    others = [name for name, value in _plain(config).items() if getattr(told, name) != value]
    if others:
        raise UsageError(
            f"no config.json of {described['model_type']} says {others[0]} {getattr(config, others[0])!r}, which "
            f"{config.name} has"
        )
    return described


def _plain(config: Config) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in LAID_OUT}


def _tensors(target: Target) -> dict[str, jax.Array]:
    """By the names of the family's own files, a tensor for each layer."""
    config: Any = target.model.config
    family = registry.by_config(config)
    kind = family.config_to_hf(config)["model_type"]
    checkpoint = Checkpoint(Path(), config, {}, family.stored_hf(config, kind))
    values = dict(jax.tree_util.tree_flatten_with_path(target.params)[0])
    values = {tuple(entry.key for entry in path): value for path, value in values.items()}
    tensors: dict[str, jax.Array] = {}
    joined: dict[str, dict[int, jax.Array]] = {}  # by row, what is one tensor there
    for leaf in list_parameters(checkpoint):
        value = values[leaf.keys]
        for layer, stored in enumerate(leaf.parts):
            one = value[layer] if leaf.stacked else value
            # In float32 what is added when it is read is taken off without rounding.
            one = one.astype(np.float32) - np.float32(stored.add) if stored.add else one
            if stored.rows:
                joined.setdefault(stored.name, {})[stored.first] = one
            else:
                tensors[stored.name] = one
    whole = lambda parts: np.concatenate([parts[first] for first in sorted(parts)])
    return tensors | {name: jax.numpy.asarray(whole(parts)) for name, parts in joined.items()}


def _copied(source: Path, folder: Path) -> dict[str, Any]:
    """Copies the tokenizer of a model folder. Returns: what its config.json says of tokens."""
    for file in sorted({file for pattern in TOKENIZER for file in source.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, folder / file.name)
    said = read_json_object(source / "config.json") or {}
    return {name: said[name] for name in IDS if name in said}
