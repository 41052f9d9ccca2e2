"""Folders of reward models: a language model whose output layer is replaced by a scalar head.

Three formats are read: classifiers of transformers with one label or two (`LlamaForSequenceClassification`,
`Qwen2ForTokenClassification`), the value heads of TRL and Skywork (`Qwen2ForPrmModel`), and Qwen's reward models
(`Qwen2ForProcessRewardModel`). The head of the last has a hidden layer.

Of two labels the second one means right, or that the target should write the step for Arbitrage's routers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.decision_heads import read_linear, read_tensor
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.model_classes import PREFIXES, SUFFIXES, named_classes
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.tensors import TensorLocation

CLASSES = (
    "forsequenceclassification", "fortokenclassification", "forrewardmodel", "forprmmodel", "forprocessrewardmodel",
)  # fmt: skip
"""The end of the names of classes with a scalar head."""

HEADS = ("score", "v_head.summary", "score.2", "classifier")
"""Names of the head's last layer. That of Qwen's reward models comes after `score.0` and a ReLU."""
HEAD_TENSOR = re.compile(r"(score|v_head|classifier)\..*|lm_head\.weight")


class RewardHead(NamedTuple):
    """A scalar head: hidden layers with ReLU, and a linear layer."""

    weight: np.ndarray  # float32[D]
    bias: float
    layers: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # (float32[out, in], float32[out]) of each hidden layer


def as_language_model(fields: ConfigFields) -> ConfigFields:
    """Return the fields of a reward model as those of the language model below its head.

    Raises: UsageError for a class that is no reward model of its `model_type`.
    """
    kind = fields.text("model_type", "")
    prefix = PREFIXES.get(kind)
    if prefix is None:
        raise UsageError(
            f"{fields.where} has the model_type {quote(kind)}, of which specjax reads no reward models; supported are "
            f"{', '.join(PREFIXES)}"
        )
    names = {prefix.lower() + part + suffix for part in ("", "text") for suffix in (*CLASSES, *SUFFIXES)}
    for entry in named_classes(fields):
        if entry.name.lower() not in names:
            raise UsageError(
                f"{fields.where} names the class {quote(entry.name)} in {entry.field}, which is no reward model of "
                f"{kind}; give a classifier with one label or two"
            )
    # The output layer is not used. Tied to the embedding, it takes no memory.
    values = {**fields.values, "architectures": [], "auto_map": None, "tie_word_embeddings": True}
    return dataclasses.replace(fields, values=values)


def read_reward_head(folder: Path) -> RewardHead:
    """Read the head of a folder. Raises: UsageError for a folder without one, or with more than two labels."""
    tensors = {
        hf.text_name(name): tensor
        for file in hf.weight_files(folder)
        for name, tensor in hf.read_tensors(file, hf.PARTS).items()
    }
    name = next((name for name in HEADS if f"{name}.weight" in tensors), None)
    if name is None:
        raise UsageError(
            f"{folder} has no head of a reward model ({' or '.join(f'{name}.weight' for name in HEADS)}); give such a "
            "folder, or a model and the file of a head"
        )
    layers = () if name != "score.2" else (_read_layer(tensors, "score.0", folder),)
    used = [name, *(["score.0"] if layers else [])]
    _check_layers(tensors, used, folder)
    weight, bias = read_linear(tensors, folder, f"{name}.")
    return RewardHead(weight, bias, layers)


def is_reward_folder(folder: Path) -> bool:
    """Return True if the config.json of a folder names a class with a scalar head."""
    if not folder.is_dir():
        return False
    names = [entry.name.lower() for entry in named_classes(hf.read_config(folder))]
    return any(name.endswith(CLASSES) for name in names)


def check_reward_folder(source: str | Path) -> None:
    """Raise a UsageError for a local source that is no folder of a reward model. No weights but the head's are read."""
    folder = in_home(source)
    if not folder.is_dir():
        raise UsageError(f"{source} is not the folder of a reward model; for other models give the file of a head too")
    with guarded_read(folder):
        as_language_model(hf.read_config(folder))
        read_reward_head(folder)


def _read_layer(tensors: Mapping[str, TensorLocation], name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    names = f"{name}.weight", f"{name}.bias"
    shapes = [tensors[entry].shape if entry in tensors else () for entry in names]
    if len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
        raise UsageError(f"{folder} has no linear layer {name} with a weight [out, in] and a bias [out]")
    weight, bias = (read_tensor(tensors, *pair, folder) for pair in zip(names, shapes, strict=True))
    return weight, bias


def _check_layers(tensors: Iterable[str], used: Iterable[str], folder: Path) -> None:
    names = {f"{name}.{leaf}" for name in used for leaf in ("weight", "bias")} | {"lm_head.weight"}
    unknown = sorted(name for name in tensors if is_head_tensor(name) and name not in names)
    if unknown:
        raise UsageError(f"{folder} has {quote(unknown[0])}, which is not a tensor of a head that specjax reads")


def is_head_tensor(name: str) -> bool:
    """Return True for a tensor that the language model below a head does not need."""
    return HEAD_TENSOR.fullmatch(name) is not None
