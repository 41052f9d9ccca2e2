"""Files of trained arrays with one entry per layer: DYNAMAX's probes, FiRST's routers and LoRA-Drop's corrections.

A safetensors or PyTorch file has these arrays of layer l. Their names and shapes are those of PyTorch's linear layers,
and `lora_adapter` is the name in the code of LoRA-Drop's authors.

- probes: `model.layers.{l}.probe.weight` [1, D] and `.bias` [1];
- routers: the same of `router`;
- corrections: `model.layers.{l}.lora_adapter.A.weight` [r, D] and `.B.weight` [D, r]. The header of a safetensors file
  can have the k and alpha of their training.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from specjax.adaptive.dynamax import Probes
from specjax.adaptive.first_routing import Routers
from specjax.adaptive.lora_drop import Corrections
from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.formats import hf
from specjax.models.loading.trained_arrays import find_file, read_array, write_arrays
from specjax.types import Array

PLACE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
CORRECTIONS = ("lora_adapter.A.weight", "lora_adapter.B.weight")
TRAINING: dict[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "every": ((int,), lambda x: 1 <= x < 1 << 31, "a whole number of at least 1"),
    "alpha": ((int, float), math.isfinite, "a number"),
}
"""The settings of the training of corrections in the header of their file: types, a check, and words for errors."""
LARGEST = 4096
"""The largest number of layers."""


def read_probes(source: str | Path) -> Probes:
    """Read the probes of all layers, as float32. Raises: UsageError for a file of other arrays."""
    weight, bias = read_layer_arrays(source, ("probe.weight", "probe.bias"), "probes")
    return Probes(*_to_vectors(weight, bias, source))


def read_routers(source: str | Path) -> Routers:
    """Read the routers of all layers, as float32. Raises: UsageError for a file of other arrays."""
    weight, bias = read_layer_arrays(source, ("router.weight", "router.bias"), "routers")
    return Routers(*_to_vectors(weight, bias, source))


def read_corrections(source: str | Path) -> Corrections:
    """Read the corrections of all layers, as float32, with the k and alpha of their training if the file has them.

    Raises: UsageError for a file of other arrays, or of other values of k and alpha.
    """
    down, up = read_layer_arrays(source, CORRECTIONS, "corrections")
    if down.ndim != 3 or up.shape != (len(down), down.shape[2], down.shape[1]):
        raise UsageError(
            f"{source} has A of shape {list(down.shape[1:])} and B of shape {list(up.shape[1:])} per layer, and they "
            "must be [rank, width] and [width, rank]"
        )
    return Corrections(down, up, **_read_training(in_home(source)))


def save_probes(file: str | Path, probes: Probes) -> None:
    """Write a .safetensors file for `read_probes`. Raises: UsageError if it cannot be written."""
    _save(file, {"probe.weight": probes.weight[:, None], "probe.bias": probes.bias[:, None]})


def save_routers(file: str | Path, routers: Routers) -> None:
    """Write a .safetensors file for `read_routers`. Raises: UsageError if it cannot be written."""
    _save(file, {"router.weight": routers.weight[:, None], "router.bias": routers.bias[:, None]})


def save_corrections(file: str | Path, corrections: Corrections) -> None:
    """Write a .safetensors file for `read_corrections`, whose header has k and alpha as "every" and "alpha".

    Raises: UsageError if it cannot be written.
    """
    settings = {name: getattr(corrections, name) for name in TRAINING if getattr(corrections, name) is not None}
    header = {"format": "pt", "kind": "corrections", "settings": json.dumps(settings)}
    _save(file, dict(zip(CORRECTIONS, (corrections.down, corrections.up), strict=True)), header)


def read_layer_arrays(source: str | Path, names: Sequence[str], noun: str) -> list[Array]:
    """Read arrays of every layer, one float32[layers, ...] for each of `names`.

    noun: a word for the content of the file in errors.

    Raises: UsageError for a file that is missing or damaged, has other arrays, or lacks those of a layer.
    """
    file = find_file(source, f"{noun} of layers")
    with guarded_read(file):
        tensors = hf.read_tensors(file)
        places: dict[tuple[int, str], str] = {}
        for name in tensors:
            match = PLACE.fullmatch(name)
            if match is None or match[2] not in names or int(match[1]) >= LARGEST:
                raise UsageError(
                    f"{file} has {quote(name)}, and not only {noun} of layers; give a file of {noun} alone"
                )
            places[int(match[1]), match[2]] = name
        layers = 1 + max((layer for layer, _ in places), default=0)
        for layer in range(layers):
            for name in names:
                first, shape = (tensors[places[i, name]].shape if (i, name) in places else () for i in (0, layer))
                _check_shapes(first, shape, f"layers.{layer}.{name}", file)
        read = lambda layer, name: read_array(tensors, places[layer, name], file)
        return [jnp.stack([read(layer, name) for layer in range(layers)]) for name in names]


def _check_shapes(first: tuple[int, ...], shape: tuple[int, ...], name: str, file: Path) -> None:
    """Raise a UsageError for an array that is missing or has another shape than that of layer 0."""
    if not first or not shape:
        raise UsageError(f"{file} has no array {name}; a file has those of every layer")
    if shape != first:
        raise UsageError(
            f"{file} has {name} of shape {quote(list(shape))}, and that of layer 0 is {quote(list(first))}"
        )


def _to_vectors(weight: Array, bias: Array, source: str | Path) -> tuple[Array, Array]:
    """Return linear layers with one output as float32[layers, D] and float32[layers]. Raises: UsageError."""
    layers, width = len(weight), weight.shape[-1]
    if weight.shape not in ((layers, 1, width), (layers, width)) or bias.shape != (layers, 1):
        raise UsageError(
            f"{source} has a weight of shape {list(weight.shape[1:])} and a bias of shape {list(bias.shape[1:])} per "
            "layer, and they must be [1, width] and [1]"
        )
    return weight.reshape(layers, width), bias[:, 0]


def _read_training(file: Path) -> dict[str, Any]:
    """Return k and alpha of a file of corrections, by name; nothing if it does not have them. Raises: UsageError."""
    if file.suffix != hf.SAFETENSORS_SUFFIX:
        return {}
    with guarded_read(file), safe_open(str(file), "numpy") as tensors:
        settings = json.loads((tensors.metadata() or {}).get("settings", "{}"))
        for name, (kinds, is_valid, form) in TRAINING.items():
            value = settings.get(name)
            if value is not None and not (type(value) in kinds and is_valid(value)):
                raise UsageError(f"{file} has {name} {quote(value)} in its header, which must be {form}")
        return {name: settings[name] for name in TRAINING if settings.get(name) is not None}


def _save(file: str | Path, arrays: Mapping[str, Array], header: dict[str, str] | None = None) -> None:
    """Write arrays [layers, ...] under the names of their layers. Raises: UsageError."""
    tensors = {
        f"model.layers.{layer}.{name}": np.array(values, np.float32)
        for name, stack in arrays.items()
        for layer, values in enumerate(stack)
    }
    write_arrays(file, tensors, header)
