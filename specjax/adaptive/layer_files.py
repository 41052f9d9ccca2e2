"""Files of trained arrays with one entry per layer: DYNAMAX's probes and FiRST's routers.

Layer l has `model.layers.{l}.probe.weight` [1, D] and `.bias` [1], or the same of `router`, in a safetensors or PyTorch
file. These are the names and shapes of a linear layer of PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specjax.adaptive.dynamax import Probes
from specjax.adaptive.first_routing import Routers
from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.tensors import TensorLocation, read_rows
from specjax.types import Array

PLACE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
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


def save_probes(file: str | Path, probes: Probes) -> None:
    """Write a .safetensors file for `read_probes`. Raises: UsageError if it cannot be written."""
    _save(file, "probe", probes.weight, probes.bias)


def save_routers(file: str | Path, routers: Routers) -> None:
    """Write a .safetensors file for `read_routers`. Raises: UsageError if it cannot be written."""
    _save(file, "router", routers.weight, routers.bias)


def read_layer_arrays(source: str | Path, names: Sequence[str], noun: str) -> list[Array]:
    """Read arrays of every layer, one float32[layers, ...] for each of `names`.

    noun: a word for the content of the file in errors.

    Raises: UsageError for a file that is missing or damaged, has other arrays, or lacks those of a layer.
    """
    file = Path(source).expanduser()
    if file.suffix not in (hf.SAFETENSORS_SUFFIX, *hf.TORCH_SUFFIXES):
        raise UsageError(f"{source} is not a .safetensors, .pt or .bin file with {noun} of layers")
    if not file.is_file():
        raise UsageError(f'there is no file "{source}" with {noun} of layers')
    with guarded_read(file):
        tensors: dict[tuple[int, str], TensorLocation] = {}
        for name, tensor in hf.read_tensors(file).items():
            match = PLACE.fullmatch(name)
            if match is None or match[2] not in names or int(match[1]) >= LARGEST:
                raise UsageError(
                    f"{file} has {quote(name)}, and not only {noun} of layers; give a file of {noun} alone"
                )
            tensors[int(match[1]), match[2]] = tensor
        layers = 1 + max((layer for layer, _ in tensors), default=0)
        return [jnp.stack([_read(tensors, layer, name, file) for layer in range(layers)]) for name in names]


def _read(tensors: dict[tuple[int, str], TensorLocation], layer: int, name: str, file: Path) -> np.ndarray:
    """Return an array of a layer, with the shape of that of layer 0. Raises: UsageError."""
    first, tensor = tensors.get((0, name)), tensors.get((layer, name))
    if first is None or tensor is None or not tensor.shape:
        raise UsageError(f"{file} has no array layers.{layer}.{name}; a file has those of every layer")
    if tensor.shape != first.shape:
        raise UsageError(
            f"{file} has layers.{layer}.{name} of shape {quote(list(tensor.shape))}, and that of layer 0 is "
            f"{quote(list(first.shape))}"
        )
    values = read_rows(tensor, 0, tensor.shape[0])
    if not np.isfinite(values).all():
        raise UsageError(f"{file} has values in layers.{layer}.{name} that are not finite")
    return values


def _to_vectors(weight: Array, bias: Array, source: str | Path) -> tuple[Array, Array]:
    """Return linear layers with one output as float32[layers, D] and float32[layers]. Raises: UsageError."""
    layers, width = len(weight), weight.shape[-1]
    if weight.shape not in ((layers, 1, width), (layers, width)) or bias.shape != (layers, 1):
        raise UsageError(
            f"{source} has a weight of shape {list(weight.shape[1:])} and a bias of shape {list(bias.shape[1:])} per "
            "layer, and they must be [1, width] and [1]"
        )
    return weight.reshape(layers, width), bias[:, 0]


def _save(file: str | Path, name: str, weight: Array, bias: Array) -> None:
    path = Path(file).expanduser()
    if path.suffix != hf.SAFETENSORS_SUFFIX:
        raise UsageError(f"{file} must end in {hf.SAFETENSORS_SUFFIX}, the format of the file")
    arrays: dict[str, np.ndarray] = {}
    for layer, (w, b) in enumerate(zip(weight, bias, strict=True)):
        arrays[f"model.layers.{layer}.{name}.weight"] = np.array(w, np.float32)[None]
        arrays[f"model.layers.{layer}.{name}.bias"] = np.array(b, np.float32)[None]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, arrays)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror or error}); choose another path") from error
