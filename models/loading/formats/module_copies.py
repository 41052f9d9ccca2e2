"""Copies of multi-token-prediction modules into the folders of written models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import CheckpointWarning
from specjax.files.untrusted import guarded_read
from specjax.models.loading.formats import hf
from specjax.models.loading.mtp_dialects import BY_NAME, GGUF, NativeModule, owner
from specjax.models.loading.tensors.tensors import TensorLocation, read_stored

FLOATS = "F32", "F16", "BF16"


def copy_module(native: NativeModule, num_layers: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors of a module to the bit, by their names in the files, and the config field with their number.

    Both are empty for a module in a GGUF file, whose tensors have other names, and for a quantised one.

    Args:
      num_layers: number of layers of the target.

    Warns: CheckpointWarning for a module that is left out.

    Raises: UsageError if the files of the target cannot be read any more.
    """
    row, path = BY_NAME[native.dialect], Path(native.source)
    if row is GGUF:
        return _left_out(native, "is in a GGUF file, whose tensors have other names")
    with guarded_read(path):
        owned = owner(row, num_layers)
        tensors: dict[str, TensorLocation] = {}
        for file in hf.weight_files(path):
            located = {hf.text_name(name): tensor for name, tensor in hf.read_tensors(file, hf.PARTS).items()}
            tensors |= {name: tensor for name, tensor in located.items() if owned(name)}
        if any(tensor.kind not in FLOATS for tensor in tensors.values()):
            return _left_out(native, "is quantised")
        return {name: read_stored(tensor) for name, tensor in tensors.items()}, {row.field: native.count}


def _left_out(native: NativeModule, reason: str) -> tuple[dict, dict]:
    message = f"the multi-token-prediction module of {native.source} is left out, because it {reason}"
    warnings.warn(message, CheckpointWarning, stacklevel=4)
    return {}, {}
