"""Hugging Face folders: config.json and files of weights, whole or in shards: safetensors, or else PyTorch's own."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import QUOTED, check_regular, first_line, parse_json, quote, read_json_object, shorten
from specjax.models.bridge import Config
from specjax.models.loading.families import denoisers, registry
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats import maxtext
from specjax.models.loading.tensors import torch_file
from specjax.models.loading.tensors.assembly import Checkpoint, StoredTensor
from specjax.models.loading.tensors.tensors import TensorLocation, check_sizes

DOWNLOADED_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is downloaded of a hub repository: no pickles, no code, no other frameworks."""

TORCH_FILES = "*.bin", "*.pt"
"""What is downloaded of a repository that has no safetensors, of those who can do without: nothing in them runs."""

SAFETENSORS, TORCH, TORCH_SUFFIXES = ".safetensors", ".bin", (".bin", ".pt")
SAFETENSORS_FILE, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
INDEX = f"{SAFETENSORS_FILE}.index.json"
SHARD = r"[^/\\\0]+"  # a name of a file in the same folder, without its ending

_BESIDE_THE_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def download(repo: str, wanted: tuple[str, ...] = DOWNLOADED_FILES) -> Path:
    """The local folder of a hub repository, from the cache or the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=list(wanted)))
    except Exception as error:  # a dozen kinds: no such repository, gated, no network, no space, ...
        message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f'"{repo}" is no local file or folder and could not be downloaded from the Hugging Face hub ({message}); '
            "check the id or the network, or give a local folder or .gguf file"
        ) from error


def read(folder: Path, **options) -> Checkpoint:
    """Parse a folder. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    where = str(folder / "config.json")
    config = read_json_object(folder / "config.json")
    if config is None:
        other = f"{folder} has no config.json; give a Hugging Face model folder, a hub id or a .gguf file"
        raise UsageError(maxtext.why_none(folder) or other)
    if config.get("quantization_config"):
        raise UsageError(f"{where} says the weights are quantised; use the original checkpoint or a GGUF of it")
    parsed, stored = parse_config(config, where, **options)
    items = maxtext.find(folder)
    if items is not None:
        if any(folder.glob(f"*{SAFETENSORS}")):
            raise UsageError(f"{folder} has safetensors and a checkpoint of MaxText; move one of the two away")
        held, stored = maxtext.read(items, parsed, ConfigFields(config, where).text("model_type", "unnamed"))
        return Checkpoint(folder, parsed, held, stored)
    tensors: dict[str, TensorLocation] = {}
    for file in weight_files(folder):
        for name, tensor in read_tensors(file).items():
            first = tensors.setdefault(_text_name(name), tensor)
            if first is not tensor:
                raise UsageError(f"{folder} has {quote(name)} twice, in {first.file.name} and {file.name}; remove one")
    tied = parsed.tied

    def ignored(name: str) -> bool:
        return (
            name.endswith("rotary_emb.inv_freq")
            or (tied and name == "lm_head.weight")
            or name.startswith(_BESIDE_THE_TEXT)
        )

    return Checkpoint(folder, parsed, tensors, stored, ignored)


def parse_config(config: dict, where: str, **options) -> tuple[Config, dict[str, StoredTensor]]:
    """(config, what is stored by parameter path) of the contents of a config.json. `options`: as for `read`."""
    fields = denoisers.as_family(ConfigFields(config, where))
    kind = fields.text("model_type", "unnamed")
    family = registry.by_hf(kind, where)
    parsed = family.config_from_hf(fields, **options)
    return parsed, family.stored_hf(parsed, kind)


def _text_name(name: str) -> str:
    """The name without the prefix that multimodal checkpoints put before their text part."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def weight_files(folder: Path) -> list[Path]:
    """The files of weights of a folder, safetensors if there are any; all shards must be there."""
    for whole, kind in ((SAFETENSORS_FILE, SAFETENSORS), (TORCH_FILE, TORCH)):
        index = read_json_object(folder / f"{whole}.index.json")
        if index is not None:
            return _shards(folder, f"{whole}.index.json", index, kind)
        files = [folder / whole] if (folder / whole).exists() else sorted(folder.glob(f"*{kind}"))
        if files and (kind == SAFETENSORS or files == [folder / whole]):  # a .bin may be anything else
            return files
    other = f"{folder} has no *.safetensors file; save the model with safe_serialization=True"
    raise UsageError(maxtext.why_no_weights(folder) or other)


def _shards(folder: Path, name: str, index: dict, kind: str) -> list[Path]:
    names = ConfigFields(index, str(folder / name)).inside("weight_map").values.values()
    outside = [
        shard for shard in names if not isinstance(shard, str) or not re.fullmatch(SHARD + re.escape(kind), shard)
    ]
    if outside:
        raise UsageError(f"{folder / name} names the shard {quote(outside[0])}, which is no file of the folder")
    files = sorted({folder / shard for shard in names})
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} of its {len(files)} shards, first {shorten(missing[0], QUOTED)}; download "
            "it again"
        )
    return files


def read_tensors(file: Path, integers: bool = False) -> dict[str, TensorLocation]:
    """The table of one file of weights, by the kind its name says. `integers`: ids may be among them."""
    return torch_file.read(file, integers) if file.suffix in TORCH_SUFFIXES else read_safetensors(file, integers)


def read_safetensors(file: Path, integers: bool = False) -> dict[str, TensorLocation]:
    """The table of one file. The library compares types, shapes and places with each other and with the file's size."""
    from safetensors import SafetensorError, safe_open

    check_regular(file)
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
        header = parse_json(handle.read(length), file, object_pairs_hook=functools.partial(_without_twins, file))
    tensors = {
        name: TensorLocation(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    check_sizes(tensors, file, integers)
    return tensors


def _without_twins(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which no key is there twice: the library takes the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UsageError(f"{file} has two entries of one name in its header; download it again")
    return found
