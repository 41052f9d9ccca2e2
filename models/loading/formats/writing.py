"""Writer of Hugging Face model folders, by the tables of the loaders, so that `load` reads them back."""

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
from specjax.files.homes import in_home
from specjax.files.untrusted import first_line, read_json_object
from specjax.models.bridge import CONFIGS, Config, has_repeated_heads
from specjax.models.loading.families import registry
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.denoisers import DenoiserSettings, write_denoiser_settings
from specjax.models.loading.formats import compressed_writing, hf
from specjax.models.loading.formats.module_copies import copy_module
from specjax.models.loading.tensors.assembly import Checkpoint, Parameter, StoredTensor, list_parameters
from specjax.models.loading.tokenizers import writing
from specjax.models.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.vision.config import VisionLanguageConfig
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat
from specjax.types import Target

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
    "generation_config.json",
)  # fmt: skip
"""Files of a folder that belong to its tokenizer, or define its end tokens."""

Place = tuple[str, int | None]
"""The name of a tensor, and the expert whose part of it a matrix is; None: the tensor is not stacked."""

TOKEN_ID_FIELDS = "bos_token_id", "eos_token_id", "pad_token_id"
RUNTIME_FIELDS = "stacked", "joined", "cache_dtype", "cache_lanes", "cache_bits", "same_bits", "quantized", "name"
"""Fields of a config that depend on the process that runs the model, or that the tensors show; they are not stored."""


def save_model(
    folder: str | Path, target: Target, tokenizer: Tokenizer | str | Path | None = None, *,
    denoiser_settings: DenoiserSettings | None = None,
) -> None:  # fmt: skip
    """Write config.json, model.safetensors and a tokenizer for `load` and other libraries, overwriting existing files.

    Weights are written to the bit, except Gemma's norms: its files store w - 1, so for w below 0.5 the last bits may
    change. Files of recurrent layers store logarithms of their decays, whose last bits may change too. Quantised
    matrices are written in the format compressed-tensors, which `load` reads back to the bit
    (`compressed_writing`). Quantised experts then have a tensor for each matrix, also in families whose files have
    those of a layer in one. A module for multi-token prediction is copied from the files of the target, and it is not
    quantised. Those of GGUF files and quantised ones are left out with a warning.

    Args:
      target: a model of `specjax.models`, which is written in its dtype and its quantised formats.
      tokenizer: the tokenizer that `load` returned, or a model folder with files to copy; None: write none.
      denoiser_settings: settings of a diffusion model, which the config then states for `load_denoiser`; None: the
        model is autoregressive.

    Raises: UsageError for a model that is not from `specjax.models`, or that is sharded with other shapes. It is also
      raised if no config.json can describe the model or its quantised formats, or the folder cannot be written.
    """
    from safetensors import SafetensorError

    fields = check_model_writable(target)
    if denoiser_settings is not None:
        fields = write_denoiser_settings(fields, denoiser_settings)
    path = in_home(folder)
    config: Any = target.model.config
    tensors, forms = _named_tensors(target)
    if target.native is not None:
        module, count = copy_module(target.native, config.num_layers)
        tensors, fields = tensors | module, fields | count
    tensors, more_fields = compressed_writing.compress(tensors, forms, _embedding_name(config), config.name)
    fields |= more_fields
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_tensors(path / hf.SAFETENSORS_FILE, tensors)
        if isinstance(tokenizer, Tokenizer):
            fields |= writing.write_tokenizer(path, tokenizer)
        elif tokenizer is not None:
            fields |= _copy_tokenizer(in_home(tokenizer), path)
        (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{folder} cannot be written ({why}); choose another folder, or free some space") from error


def check_model_writable(target: Target) -> dict[str, Any]:
    """Return the config.json that `save_model` writes. Shapes of the parameters are enough.

    Raises: UsageError, as `save_model` does.
    """
    config: Any = target.model.config
    if type(config) not in CONFIGS:
        raise UsageError(f"{target.model.name} has no config of specjax.models, so no config.json can describe it")
    if config.experts is not None and config.experts.shuffling is not None:
        raise UsageError(
            f"{config.name} has experts in groups for devices, which no config.json can state; save the target that "
            "group_experts received"
        )
    if has_repeated_heads(config, target.params):
        raise UsageError(
            f"{target.model.name} is sharded over a mesh that repeats some of its heads; save it from one device"
        )
    family = registry.by_config(config)
    if not hasattr(family, "config_to_hf"):
        raise UsageError(
            f"{config.name} cannot be saved, because parts of its files for images are not loaded; keep them"
        )
    fields = family.config_to_hf(config)
    reads_images = isinstance(config, VisionLanguageConfig)
    parsed = hf.parse_config(ConfigFields(fields, config.name), dtype=config.dtype, reads_images=reads_images)[0]
    parsed = dataclasses.replace(parsed, max_positions=config.max_positions)  # a limit: YaRN's is stated by its factor
    differing = [name for name, value in _stored_fields(config).items() if getattr(parsed, name) != value]
    if differing:
        raise UsageError(
            f"{config.name} has {differing[0]} {getattr(config, differing[0])!r}, which a config.json of type "
            f"{fields['model_type']} cannot express"
        )
    return fields


def _stored_fields(config: Config) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in RUNTIME_FIELDS}


def _table(config: Config) -> dict[str, StoredTensor]:
    """Return the tensors of the family's own files, by parameter path."""
    family = registry.by_config(config)
    return family.stored_hf(config, family.config_to_hf(config)["model_type"])


def _embedding_name(config: Config) -> str:
    return _table(config)["embed.weight"].name


def _named_tensors(target: Target) -> tuple[dict[str, Any], dict[str, WeightFormat]]:
    """Return the tensors under the names of the family's own files, one per layer and projection.

    The formats are those of the tensors that are quantised, by name.
    """
    config: Any = target.model.config
    checkpoint = Checkpoint(Path(), config, {}, _table(config))
    is_matrix = lambda value: isinstance(value, QuantizedArray)
    values = dict(jax.tree_util.tree_flatten_with_path(target.params, is_leaf=is_matrix)[0])
    values = {tuple(entry.key for entry in path): value for path, value in values.items()}
    tensors: dict[Place, Any] = {}
    forms: dict[str, WeightFormat] = {}
    joined_parts: dict[Place, list[tuple[np.ndarray, Any]]] = {}  # parts of a joined tensor, with their rows
    transposes: set[str] = set()
    for leaf in _parameters_in_files(checkpoint):
        value = values[leaf.keys]
        for part in leaf.parts:
            stored, tensor = part.stored, value[part.at] if part.at else value
            tensor = tensor if part.rows is None else tensor[part.rows]
            tensor = _stored_values(tensor, stored)
            place = stored.name, stored.expert
            transposes |= {stored.name} if stored.transposed else set()
            if stored.rows:
                order = np.arange(tensor.shape[0]) if stored.order is None else stored.order
                joined_parts.setdefault(place, []).append((stored.first + order, tensor))
            else:
                tensors[place] = tensor
            if leaf.form is not None:
                forms[stored.name] = leaf.form
    tensors |= {place: _joined(parts) for place, parts in joined_parts.items()}
    return _stacked({place: x.T if place[0] in transposes else x for place, x in tensors.items()}), forms


def _parameters_in_files(checkpoint: Checkpoint) -> list[Parameter]:
    """Return the parameters with their names in files. Experts that are quantised have a tensor for each matrix.

    The format compressed-tensors has no stacks of quantised matrices.
    """
    parameters = list(list_parameters(checkpoint))
    if not any(leaf.form is not None and leaf.parts[0].stored.stacked for leaf in parameters):
        return parameters
    separate = registry.by_config(checkpoint.config).separate_hf(checkpoint.config)
    return list(list_parameters(checkpoint._replace(stored=checkpoint.stored | separate)))


def _stacked(tensors: dict[Place, Any]) -> dict[str, Any]:
    """Return tensors by name, with those of all experts of a name in one."""
    of_experts: dict[str, list[Any]] = {}
    for (name, expert), tensor in tensors.items():
        if expert is not None:
            of_experts.setdefault(name, []).append(tensor)
    separate = {name: tensor for (name, expert), tensor in tensors.items() if expert is None}
    return separate | {name: jax.numpy.stack(parts) for name, parts in of_experts.items()}


def _stored_values(tensor: Any, stored: StoredTensor) -> Any:
    """Return the elements of a parameter as the file has them, the inverse of what loading does with one tensor."""
    if stored.change is not None:
        tensor = jax.numpy.asarray(stored.change.write(np.asarray(tensor, np.float32)))
    # Loading adds this number, and subtracting it in float32 is exact.
    tensor = tensor.astype(np.float32) - np.float32(stored.add) if stored.add else tensor
    if stored.order is not None and not stored.rows:
        tensor = tensor[np.argsort(stored.order)]
    if stored.columns is not None:
        tensor = tensor[:, np.argsort(stored.columns)]
    return tensor[:, None] if stored.unit_axis else tensor


def _joined(parts: list[tuple[np.ndarray, Any]]) -> Any:
    """Return the tensor of which `parts` are (rows of the tensor, values)."""
    rows, values = zip(*parts, strict=True)
    order = np.argsort(np.concatenate(rows))
    return jax.tree.map(lambda *arrays: jax.numpy.asarray(np.concatenate(arrays)[order]), *values)


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, Any]:
    """Copy the tokenizer of a model folder. Return the token ids of its config.json."""
    for file in sorted({file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}):
        if file.resolve() != (folder / file.name).resolve():
            shutil.copyfile(file, folder / file.name)
    config = read_json_object(source / "config.json") or {}
    return {name: config[name] for name in TOKEN_ID_FIELDS if name in config}
