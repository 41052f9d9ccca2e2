"""The files of a head before any weight is read, and the plan that maps their tensors to parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import check_folder, quote, read_json_object
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors import torch_file
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.loading.tensors.tensors import INTEGERS, TensorLocation, bytes_of
from specjax.types import Array

Rules = tuple[tuple[str, str | Callable[[re.Match], str]], ...]
"""Regular expressions and their replacements, which rename the tensors of a file to the names of a format's table."""


MLP = "gate", "up", "down"

MASK, MASK_FILE = "mask_embedding", "mask_embedding.pt"
"""The input of block drafters in place of the mask token's embedding, and the file that some writers store it in."""


class Contents(NamedTuple):
    """The config of a folder and the locations of its tensors."""

    folder: Path
    config: ConfigFields
    tensors: dict[str, TensorLocation]
    token_map: np.ndarray | None = None  # int64[n], ids to which the user restricts the draft vocabulary
    changes: Mapping[str, Any] = {}  # settings of the head that the user overrides, by name
    tokenizer: Any = None  # of the target


class Tensors(dict[str, TensorLocation]):
    """Tensors by the names of a format's table. `file_names` has their names in the file.

    missing_name: a function from the name of a missing tensor in the table to its name in the file.
    """

    def __init__(self, missing_name: Callable[[str], str] = str) -> None:
        super().__init__()
        self.file_names: dict[str, str] = {}
        self.missing_name = missing_name

    def shape(self, name: str, where: Path) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises: UsageError for a missing tensor."""
        if name not in self:
            raise UsageError(f"{where} has no tensor {self.missing_name(name)}, which a head of this kind needs")
        return self[name].shape


class HeadPlan(NamedTuple):
    """The sources of a head's parameters."""

    kind: str  # of `specjax.models.heads.kinds`
    dialect: str
    config: Any
    table: Mapping[str, str]  # tensor names by parameter path; `*` stands for a number, `*+1` for the next number
    tensors: Tensors
    flags: Mapping[str, Any]  # detected properties, for reports
    arrays: Mapping[str, np.ndarray | Array | Callable[[Any], np.ndarray]] = {}
    """Parameters that are not read from a tensor of the file, or functions that return them for a config."""
    notes: tuple[str, ...] = ()  # assumptions, for reports
    unused: tuple[str, ...] = ()  # patterns of tensors that are ignored
    assumed: tuple[str, ...] = ()  # settings that the files leave open
    stored: Callable[[str], StoredTensor] = StoredTensor  # how a tensor of the table is stored in the file


def read_contents(folder: Path) -> Contents:
    """Read the config and the tensor locations of a folder.

    Raises: UsageError for a folder without a config, for quantised weights, or for a tensor that occurs twice.
    """
    check_folder(folder)
    where = config_file(folder)
    config = read_json_object(where)
    if config is None:
        raise UsageError(f"{folder} has no config.json, so the layout of its weights is unknown; add the file")
    if config.get("quantization_config"):
        raise UsageError(f"the weights of {where} are quantised; use the original checkpoint")
    tensors: dict[str, TensorLocation] = {}
    for file in _files(folder):
        for name, tensor in hf.read_tensors(file, INTEGERS).items():
            _add(tensors, name, tensor, folder)
    if (folder / MASK_FILE).exists():
        _add(tensors, MASK, torch_file.read_vector(folder / MASK_FILE), folder)
    return Contents(folder, ConfigFields(config, str(where)), tensors)


def _add(tensors: dict[str, TensorLocation], name: str, tensor: TensorLocation, folder: Path) -> None:
    """Add a tensor to a table. Raises: UsageError if the table has one of this name."""
    first = tensors.setdefault(name, tensor)
    if first is not tensor:
        raise UsageError(f"{folder} has {quote(name)} twice, in {first.file.name} and {tensor.file.name}; remove one")


def config_file(folder: Path) -> Path:
    """Return the path of config.json, or of a PEFT adapter's config."""
    config, adapter = folder / "config.json", folder / "adapter_config.json"
    return adapter if adapter.exists() and not config.exists() else config


def _files(folder: Path) -> list[Path]:
    if any(folder.glob(f"*{hf.SAFETENSORS_SUFFIX}")) or (folder / hf.TORCH_FILE).exists():
        return hf.weight_files(folder)
    adapter, lone = folder / "adapter_model.bin", sorted(file for file in folder.glob("*.pt") if file.name != MASK_FILE)
    if adapter.exists() or lone:
        return [adapter] if adapter.exists() else lone
    return hf.weight_files(folder)


def rename_tensors(contents: Contents, rules: Rules) -> Tensors:
    """Return the tensors by the names of the format's table. Raises: UsageError if two tensors get the same name."""
    tensors = Tensors()
    for name, tensor in contents.tensors.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in tensors:
            first = quote(tensors.file_names[new])
            raise UsageError(f"{contents.folder} has {first} and {quote(name)}, which are one tensor; remove one")
        tensors[new], tensors.file_names[new] = tensor, name
    return tensors


def attention_table(path: str, name: str) -> dict[str, str]:
    """Return the tensor names of an attention's parameters below `path`, those of Hugging Face's `name.self_attn`."""
    projections = {
        f"{path}.{part}.{leaf}": f"{name}.self_attn.{part}_proj.{leaf}"
        for part in "qkvo"
        for leaf in ("weight", "bias")
    }
    return projections | {f"{path}.{part}_norm.weight": f"{name}.self_attn.{part}_norm.weight" for part in "qk"}


def mlp_table(path: str, name: str) -> dict[str, str]:
    """Return the tensor names of a gated MLP's parameters below `path`, those of Hugging Face's `name.mlp`."""
    return {f"{path}.{part}.weight": f"{name}.mlp.{part}_proj.weight" for part in MLP}


def experts_table(path: str, name: str) -> dict[str, str]:
    """Return the tensor names of the parameters of a mixture of experts below `path`, with `#` for the expert.

    They are those of Qwen's `name.mlp`, and the correction of DeepSeek's router.
    """
    matrices = {f"{path}.expert_{part}.weight": f"{name}.mlp.experts.#.{part}_proj.weight" for part in MLP}
    shared = {f"{path}.shared.{part}.weight": f"{name}.mlp.shared_expert.{part}_proj.weight" for part in MLP}
    return {
        **matrices,
        **shared,
        f"{path}.router.weight": f"{name}.mlp.gate.weight",
        f"{path}.router.correction": f"{name}.mlp.gate.e_score_correction_bias",
        f"{path}.shared_gate.weight": f"{name}.mlp.shared_expert_gate.weight",
    }


def layer_table(path: str, name: str) -> dict[str, str]:
    """Return the tensor names of a decoder layer's parameters below `path`, those of Hugging Face's layer `name`."""
    return {
        f"{path}.attention_norm.weight": f"{name}.input_layernorm.weight",
        f"{path}.mlp_norm.weight": f"{name}.post_attention_layernorm.weight",
        **attention_table(f"{path}.attention", name),
        **mlp_table(f"{path}.mlp", name),
    }


def count_indices(tensors: Mapping[str, TensorLocation], pattern: str) -> int:
    """Return the number of distinct values that the first group of `pattern` matches in the names."""
    matches = (re.match(pattern, name) for name in tensors)
    return len({match[1] for match in matches if match})


def split_fused(tensors: Tensors, c: LlamaConfig) -> None:
    """Split fused projections into q, k and v, or gate and up. Raises: UsageError for an unexpected number of rows."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fused = {
        "qkv_proj": {"q_proj": heads, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": c.mlp_width, "up_proj": c.mlp_width},
    }
    for joined, parts in fused.items():
        for name in [name for name in tensors if f".{joined}." in name]:
            tensor, file_name, row = tensors.pop(name), tensors.file_names.pop(name), 0
            if tensor.shape[0] != sum(parts.values()):
                raise UsageError(
                    f"{tensor.file} has {quote(file_name)} with {tensor.shape[0]} rows, but config.json implies "
                    f"{' + '.join(map(str, parts.values()))}"
                )
            for part, rows in parts.items():
                start = bytes_of(tensor.kind, row * math.prod(tensor.shape[1:]))
                new = name.replace(joined, part)
                tensors[new] = tensor._replace(offset=tensor.offset + start, shape=(rows, *tensor.shape[1:]))
                tensors.file_names[new], row = file_name, row + rows
