"""Hugging Face folders: config.json and weight files, complete or in shards, in safetensors or PyTorch format."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from specjax.errors import CheckpointWarning, UsageError
from specjax.files.untrusted import QUOTED, check_file, first_line, parse_json, quote, read_json_object, shorten
from specjax.models.bridge import Config
from specjax.models.loading.families import denoisers, registry
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats import maxtext
from specjax.models.loading.mtp_dialects import NativeModule, describe, find_dialect, owner
from specjax.models.loading.quantized import Quantization, as_matrices, matrix_name, method_of, zero_biases
from specjax.models.loading.tensors import torch_file
from specjax.models.loading.tensors.assembly import Checkpoint, StoredTensor
from specjax.models.loading.tensors.tensors import (
    CODES,
    INTEGERS,
    StoredArray,
    TensorLocation,
    check_sizes,
    equal_values,
)
from specjax.models.vision.config import VisionLanguageConfig

DOWNLOADED_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "model.bin")
"""Files that are downloaded from a hub repository: no pickles and no code. model.bin is the file of CTranslate2."""

TORCH_FILES = "*.bin", "*.pt"
"""Additional files for readers that accept a repository without safetensors. No code in them is run."""

SAFETENSORS_SUFFIX, TORCH_SUFFIX, TORCH_SUFFIXES = ".safetensors", ".bin", (".bin", ".pt")
SAFETENSORS_FILE, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
INDEX = f"{SAFETENSORS_FILE}.index.json"
ADAPTER = "adapter_"  # the beginning of the names of PEFT's files
SHARD_NAME = r"[^/\\\0]+"  # a file name in the same folder, without its suffix

PARTS = frozenset({*INTEGERS, *CODES})
"""Storage formats of parts of quantised matrices."""

_OTHER_INPUTS = (
    "vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.", "embed_vision.", "embed_audio.",
    "vision_embedder.", "vqmodel.", "vision_model.", "aligner.",
)  # fmt: skip
_NON_TEXT_PREFIXES = tuple(prefix + module for prefix in ("", "model.") for module in _OTHER_INPUTS)


def download(repo: str, patterns: tuple[str, ...] = DOWNLOADED_FILES) -> Path:
    """Return the local folder of a hub repository, from the cache or the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns)))
    except Exception as error:  # many kinds: unknown or gated repository, no network, no space, ...
        raise download_error(repo, error) from error


def download_error(repo: str, error: Exception) -> UsageError:
    """Return the error for a hub repository that cannot be downloaded."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UsageError(
        f'"{repo}" is not a local file or folder and could not be downloaded from the hub ({message}); '
        "check the id or the network, or give a local folder or .gguf file"
    )


def read_config(folder: Path) -> ConfigFields:
    """Read the fields of config.json. Raises: UsageError for a folder without it."""
    where = str(folder / "config.json")
    config = read_json_object(folder / "config.json")
    if config is None:
        message = f"{folder} has no config.json; give a Hugging Face model folder, a hub id or a .gguf file"
        raise UsageError(_explain_other_files(folder) or maxtext.explain_missing_config(folder) or message)
    return ConfigFields(config | _generation_fields(folder, config.get("model_type")), where)


def _generation_fields(folder: Path, kind: Any) -> dict[str, Any]:
    """Return the fields of generation_config.json that belong to the config of a family.

    Newer files state the tokens that start a text only there. transformers uses these where both files state one.
    """
    family = next((family for family in registry.FAMILIES if kind in getattr(family, "HF_TYPES", ())), None)
    names = getattr(family, "GENERATION_FIELDS", ())
    generation = (read_json_object(folder / "generation_config.json") or {}) if names else {}
    return {name: generation[name] for name in names if generation.get(name) is not None}


def read(
    folder: Path, fields: ConfigFields | None = None, *, without: Callable[[str], bool] = lambda name: False,
    reads_images: bool = False, **options,
) -> Checkpoint:  # fmt: skip
    """Parse a folder.

    Args:
      fields: its config, which records what is read; None: it is read from the folder.
      without: names of tensors that are not part of the language model.
      reads_images: True to read the image tower of a model whose text is also a model of its own, if it is there.
      options: dtype, cache_dtype, name, and those of `storage_options`.
    """
    fields = fields or read_config(folder)
    method = method_of(fields, folder)
    reads_images = reads_images and method is None and _has_tower(folder, fields)
    parsed, stored = parse_config(fields, reads_images=reads_images, **options)
    items = maxtext.find_orbax_folder(folder)
    if items is not None:
        if method is not None:
            raise UsageError(f"{folder} has quantised weights in a MaxText checkpoint; use the original checkpoint")
        if any(folder.glob(f"*{SAFETENSORS_SUFFIX}")):
            raise UsageError(f"{folder} has both safetensors and a MaxText checkpoint; remove one of them")
        arrays, stored = maxtext.read(items, parsed, fields.text("model_type", "unnamed"))
        return Checkpoint(folder, parsed, arrays, stored)
    files = [file for file in weight_files(folder) if not file.name.startswith(ADAPTER)]
    if not files:
        raise UsageError(_explain_other_files(folder))
    if any(folder.glob(f"{ADAPTER}*")):
        warnings.warn(
            f"{folder} has an adapter beside the model, which is not applied", CheckpointWarning, stacklevel=5
        )
    prefixes = () if isinstance(parsed, VisionLanguageConfig) else _NON_TEXT_PREFIXES
    ignored = lambda name: name.endswith("rotary_emb.inv_freq") or name.startswith(prefixes)
    located = _locate_tensors(folder, files, lambda name: without(name) or ignored(name), method is not None)
    native, located = _split_module(folder, parsed.num_layers, located, method)
    tensors: dict[str, StoredArray] = {**located} if method is None else as_matrices(located, method)
    find_variant = getattr(registry.by_config(parsed), "variant_hf", None)
    if find_variant is not None:
        stored |= find_variant(parsed, tensors)
    if parsed.tied:
        parsed = _resolve_tied_head(folder, parsed, tensors, stored)
    spare = _unused(parsed) | (frozenset() if method is None else zero_biases(tensors))
    return Checkpoint(folder, parsed, tensors, stored, spare.__contains__, native)


def _has_tower(folder: Path, fields: ConfigFields) -> bool:
    """Return True if the text of a model can be read alone, and its image tower is in the files too."""
    family = registry.with_images(fields.text("model_type", "unnamed"))
    if family is None or not fields.has("vision_config") or maxtext.find_orbax_folder(folder) is not None:
        return False
    return any(name.startswith(family.TOWER) for file in weight_files(folder) for name in read_tensors(file))


def _unused(config: Config) -> frozenset[str]:
    """Return the tensors that checkpoints of a family may have, and that its models do not read."""
    find = getattr(registry.by_config(config), "unused_hf", None)
    return frozenset() if find is None else find(config)


def find_module(folder: Path, num_layers: int) -> NativeModule | None:
    """Return the multi-token-prediction module of a folder whose model has this number of layers, or None."""
    files = [file for file in weight_files(folder) if not file.name.startswith(ADAPTER)]
    tensors = {text_name(name): tensor for file in files for name, tensor in read_tensors(file, PARTS).items()}
    return _split_module(folder, num_layers, tensors, method_of(read_config(folder), folder))[0]


def _split_module(
    folder: Path, num_layers: int, tensors: dict[str, TensorLocation], method: Quantization | None
) -> tuple[NativeModule | None, dict[str, TensorLocation]]:
    """Return the multi-token-prediction module of a folder, if any, and the tensors without those of the module."""
    names = {name: matrix_name(name, method) for name in tensors}
    dialect = find_dialect(names.values(), num_layers)
    if dialect is None:
        return None, tensors
    owned = owner(dialect, num_layers)
    remaining = {name: tensor for name, tensor in tensors.items() if not owned(name)}
    return describe(str(folder.resolve()), dialect, {names[name] for name in names if owned(name)}), remaining


def _locate_tensors(
    folder: Path, files: list[Path], without: Callable[[str], bool], is_quantized: bool
) -> dict[str, TensorLocation]:
    """Read the tables of all weight files of a folder. `without`: names of tensors that are left out."""
    tensors: dict[str, TensorLocation] = {}
    for file in files:
        if is_quantized and file.suffix in TORCH_SUFFIXES:
            raise UsageError(f"{file} has quantised weights in PyTorch's format; save the model as safetensors")
        for name, tensor in read_tensors(file, PARTS if is_quantized else ()).items():
            if without(text_name(name)):
                continue
            previous = tensors.setdefault(text_name(name), tensor)
            if previous is not tensor:
                raise UsageError(f"{folder} has {quote(name)} in {previous.file.name} and in {file.name}; remove one")
    return tensors


def _resolve_tied_head(
    folder: Path, config: Config, tensors: dict[str, StoredArray], stored: dict[str, StoredTensor]
) -> Config:
    """Return the config of a model whose config.json ties the output layer to the embedding.

    A file can have one table under the other's name, a copy of it, or another output layer. The last one counts, with a
    note, as in transformers. Copies are removed from `tensors`.
    """
    embedding, head = stored["embed.weight"].name, stored["head.weight"].name
    if head not in tensors:
        return config
    if embedding not in tensors:
        tensors[embedding] = tensors.pop(head)
    elif equal_values(tensors[embedding], tensors[head]):
        tensors.pop(head)
    else:
        message = f"{folder} ties the output layer to the embedding, but its {head} is another matrix, which is used"
        warnings.warn(message, CheckpointWarning, stacklevel=6)
        return dataclasses.replace(config, tied=False)
    return config


def parse_config(
    fields: ConfigFields, *, reads_images: bool = False, **options
) -> tuple[Config, dict[str, StoredTensor]]:
    """Return the config, and the stored tensors by parameter path, for the fields of a config.json.

    The arguments are those of `read`.
    """
    fields = denoisers.to_base_family(fields)
    kind = fields.text("model_type", "unnamed")
    family = (registry.with_images(kind) if reads_images else None) or registry.by_hf(kind, fields.where)
    parsed = family.config_from_hf(fields, **options)
    return parsed, family.stored_hf(parsed, kind)


def text_name(name: str) -> str:
    """Strip the prefix that multimodal checkpoints and TRL's value heads add to the names of the language model."""
    name = name.removeprefix("pretrained_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, safetensors if there are any. All shards must exist."""
    for filename, kind in ((SAFETENSORS_FILE, SAFETENSORS_SUFFIX), (TORCH_FILE, TORCH_SUFFIX)):
        index = read_json_object(folder / f"{filename}.index.json")
        if index is not None:
            _check_one_model(folder, filename, index)
            return _shards(folder, f"{filename}.index.json", index, kind)
        files = [folder / filename] if (folder / filename).exists() else sorted(folder.glob(f"*{kind}"))
        if files and (kind == SAFETENSORS_SUFFIX or files == [folder / filename]):  # other .bin files may be anything
            return files
    message = f"{folder} has no *.safetensors file; save the model with safe_serialization=True"
    raise UsageError(_explain_other_files(folder) or maxtext.explain_missing_weights(folder) or message)


def _explain_other_files(folder: Path) -> str | None:
    """Return an error message for a folder with an adapter, or with models in other formats; None for other folders."""
    if any(folder.glob(f"{ADAPTER}*")):
        return f"{folder} has an adapter, not a model; merge it into its base model (merge_and_unload), and save that"
    files = sorted(folder.glob("*.gguf"))
    if files:
        return f"{folder} has GGUF files and no *.safetensors; give one of the files, such as {files[0]}"
    return None


def _check_one_model(folder: Path, filename: str, index: dict) -> None:
    """Raise a UsageError if a folder has an index of shards and another whole file, which libraries may prefer."""
    shards = ConfigFields(index, str(folder / f"{filename}.index.json")).subfields("weight_map").values.values()
    if (folder / filename).exists() and filename not in shards:
        raise UsageError(
            f"{folder} has {filename}, and {filename}.index.json names other files; remove one of the two, because "
            "libraries read one or the other"
        )


def _shards(folder: Path, name: str, index: dict, kind: str) -> list[Path]:
    names = ConfigFields(index, str(folder / name)).subfields("weight_map").values.values()
    invalid = [
        shard for shard in names if not isinstance(shard, str) or not re.fullmatch(SHARD_NAME + re.escape(kind), shard)
    ]
    if invalid:
        raise UsageError(
            f"{folder / name} names the shard {quote(invalid[0])}, which is not a file name in that folder"
        )
    files = sorted({folder / shard for shard in names})
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} of its {len(files)} shards, first {shorten(missing[0], QUOTED)}; download "
            "it again"
        )
    return files


def read_tensors(file: Path, extra_kinds: Collection[str] = ()) -> dict[str, TensorLocation]:
    """Read the table of one weight file, in the format of its suffix.

    extra_kinds: storage formats that are allowed besides floats, of INTEGERS and CODES.
    """
    return torch_file.read(file, extra_kinds) if file.suffix in TORCH_SUFFIXES else read_safetensors(file, extra_kinds)


def read_safetensors(file: Path, extra_kinds: Collection[str] = ()) -> dict[str, TensorLocation]:
    """Read the table of one file. `extra_kinds`: see `read_tensors`.

    The library checks types, shapes and offsets against each other and the size of the file.
    """
    from safetensors import SafetensorError, safe_open

    check_file(file)
    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise UsageError(
            f"{file} is not a whole safetensors file: cut short, changed or of another kind ({first_line(error)}); "
            "download it again"
        ) from None
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = parse_json(handle.read(length), file, object_pairs_hook=functools.partial(_unique_entries, file))
    tensors = {
        name: TensorLocation(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    check_sizes(tensors, file, extra_kinds)
    return tensors


def _unique_entries(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, refusing duplicate keys. The JSON library would take the last one."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise UsageError(f"{file} has two entries with the same name in its header; download it again")
    return entries
