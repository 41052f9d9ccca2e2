"""Hugging Face folders: config.json and safetensors files, whole or in shards."""

from __future__ import annotations

import json
from pathlib import Path

from specjax.errors import UsageError
from specjax.models.loading import families
from specjax.models.loading.assembly import Checkpoint
from specjax.models.loading.tensors import Tensor, check_sizes

WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is downloaded of a hub repository: no pickles, no other frameworks."""

_BESIDE_THE_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def download(repo: str) -> Path:
    """The local folder of a hub repository, from the cache or the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=list(WANTED)))
    except Exception as error:  # a dozen kinds: no such repository, gated, no network, no space, ...
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f'"{repo}" is no local file or folder and could not be downloaded from the Hugging Face hub ({reason}); '
            "check the id or the network, or give a local folder or .gguf file"
        ) from error


def read(folder: Path, **options) -> Checkpoint:
    """Parse a folder. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    where = str(folder / "config.json")
    config = read_json(folder / "config.json")
    if config is None:
        raise UsageError(f"{folder} has no config.json; give a Hugging Face model folder, a hub id or a .gguf file")
    if config.get("quantization_config"):
        raise UsageError(f"{where} says the weights are quantised; use the original checkpoint or a GGUF of it")
    kind = config.get("model_type") or "unnamed"
    family = families.by_hf(kind, where)
    parsed = family.config_from_hf(config, where, **options)
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        tensors |= {_text_name(name): tensor for name, tensor in read_safetensors(file).items()}
    tied = parsed.tied

    def ignored(name: str) -> bool:
        return (
            name.endswith("rotary_emb.inv_freq")
            or (tied and name == "lm_head.weight")
            or name.startswith(_BESIDE_THE_TEXT)
        )

    return Checkpoint(folder, parsed, tensors, family.stored_hf(parsed), ignored)


def _text_name(name: str) -> str:
    """The name without the prefix that multimodal checkpoints put before their text part."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; all shards must be there."""
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        files = sorted({folder / name for name in index.get("weight_map", {}).values()})
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise UsageError(
                f"{folder} lacks {len(missing)} of its {len(files)} shards, first {missing[0]}; download it again"
            )
        return files
    whole = folder / "model.safetensors"
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} has no *.safetensors file; save the model with safe_serialization=True")
    return files


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The table of one file: a length, a JSON header, then the data."""
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        head = handle.read(length) if length <= file.stat().st_size else b""
    try:
        header = json.loads(head)
        tensors = {
            name: Tensor(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UsageError(f"{file} is not a safetensors file, or is cut short; download it again") from None
    check_sizes(tensors, file)
    return tensors


def read_json(file: Path) -> dict | None:
    """The contents of a JSON file, None if there is none."""
    if not file.exists():
        return None
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON ({error})") from None
    if not isinstance(contents, dict):
        raise UsageError(f"{file} is not a JSON object")
    return contents
