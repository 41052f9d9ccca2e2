"""Config of a model that keeps the matrices of a quantised file in its formats."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping

import numpy as np

from specjax.errors import CheckpointWarning
from specjax.models.bridge import Config
from specjax.models.loading.tensors.assembly import Checkpoint, list_parameters
from specjax.models.loading.tensors.tensors import LazyTensor, QuantizedTensor, groups_in_order
from specjax.models.storage import JOINED, MIN_GROUP, stored_format, with_quantized
from specjax.numerics.quantized_array import WeightFormat

Formats = dict[str, WeightFormat | None]


def with_file_formats(checkpoint: Checkpoint, platform: str) -> Config:
    """Return the config of a checkpoint with the format of each matrix in the file.

    Layers whose formats differ are not stacked. Projections whose formats differ are not joined.

    Warns: CheckpointWarning for quantised matrices that products cannot use as they are stored, and that are expanded.
    """
    _note_expanded(checkpoint)
    by_layer = _formats_by_module(checkpoint, platform)
    if not any(by_layer.values()):
        return checkpoint.config
    rows, is_uniform = _by_pattern(by_layer)
    config = dataclasses.replace(checkpoint.config, stacked=checkpoint.config.stacked and is_uniform)
    rows, joined = _joined(rows, config.joined)
    config = dataclasses.replace(config, joined=joined)
    return with_quantized(config, tuple(rows.items()), platform)


def _note_expanded(checkpoint: Checkpoint) -> None:
    """Give a CheckpointWarning with the number of quantised matrices that have no format, and the reasons."""
    obstacles = Counter(
        tensor.obstacle for tensor in checkpoint.tensors.values() if isinstance(tensor, LazyTensor) and tensor.obstacle
    )
    obstacles += Counter(
        f"scales for fewer than {MIN_GROUP} inputs"
        for tensor in checkpoint.tensors.values()
        if isinstance(tensor, QuantizedTensor) and (tensor.form.group or MIN_GROUP) < MIN_GROUP
    )
    if obstacles:
        reasons = "; ".join(f"{count} with {obstacle}" for obstacle, count in obstacles.items())
        warnings.warn(
            f"{checkpoint.path} has quantised matrices that products cannot use as they are stored, so these are "
            f"expanded in memory: {reasons}",
            CheckpointWarning,
            stacklevel=5,
        )


def _formats_by_module(checkpoint: Checkpoint, platform: str) -> Formats:
    """Return the stored format of each matrix by its module's path; None: it is not quantised."""
    separate = dataclasses.replace(checkpoint.config, stacked=False, joined=())
    formats: Formats = {}
    for parameter in list_parameters(checkpoint._replace(config=separate)):
        if parameter.keys[-1] == "weight" and len(parameter.layer_shape) == 2:
            stored = parameter.parts[0].stored
            tensor = checkpoint.tensors[stored.name]
            if isinstance(tensor, QuantizedTensor) and keeps_groups(tensor, stored.columns):
                form = stored_format(tensor.form, platform)
            else:
                form = None
            formats[".".join(map(str, parameter.keys[:-1]))] = form
    return formats


def keeps_groups(tensor: QuantizedTensor, columns: np.ndarray | None) -> bool:
    """Return True if the groups of a matrix stay whole when its columns are reordered. None: they are not."""
    group = tensor.form.group
    return columns is None or group is None or groups_in_order(columns, group) is not None


def _by_pattern(formats: Formats) -> tuple[Formats, bool]:
    """Return the formats by patterns of paths, and True if all layers have equal formats."""
    by_pattern: dict[str, set] = {}
    for path, form in formats.items():
        by_pattern.setdefault(_pattern(path), set()).add(form)
    is_uniform = all(len(forms) == 1 for forms in by_pattern.values())
    return ({pattern: forms.pop() for pattern, forms in by_pattern.items()} if is_uniform else formats), is_uniform


def _pattern(path: str) -> str:
    parts = path.split(".")
    return ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "layers" else path


def _joined(formats: Mapping[str, WeightFormat | None], names: tuple[str, ...]) -> tuple[Formats, tuple[str, ...]]:
    """Return the formats of a model with joined projections, and those of `names` whose members have equal formats."""
    owner = {member: name for name in names for member in JOINED[name]}
    split = {path: path.rpartition(".") for path in formats}
    groups: dict[tuple[str, str], set] = {}
    for path, (parent, _, member) in split.items():
        if member in owner:
            groups.setdefault((owner[member], parent), set()).add(formats[path])
    uneven = {name for (name, _), forms in groups.items() if len(forms) > 1}
    joined = tuple(name for name in names if name not in uneven)
    module = lambda parent, member: f"{parent}.{owner[member]}" if owner.get(member) in joined else f"{parent}.{member}"
    return {
        module(parent, member) if parent else path: formats[path] for path, (parent, _, member) in split.items()
    }, joined
