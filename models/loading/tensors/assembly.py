"""From a table of stored tensors to the parameters of a model, one tensor at a time.

The largest come first, so that the scratch memory of the biggest is never on top of a full model. On CPU the arrays
that are filled here *become* the parameters (jax aliases aligned memory), so no weight exists twice. With a mesh each
process fills only the parts of its own devices, from the rows that these need: no process holds or reads a whole model.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.errors import UsageError
from specjax.files.untrusted import QUOTED, SENTENCE, quote, shorten
from specjax.models.bridge import Config, abstract_params
from specjax.models.layout import has_kv_head_rows, shard_config
from specjax.models.loading.tensors.tensors import LazyTensor, TensorLocation, read_rows
from specjax.types import PyTree

ALIGNMENT = 64  # bytes; jax copies numpy memory that is less aligned
CHUNK = 1 << 17  # elements dequantised at a time: the scratch arrays of one chunk stay in cache
SHOWN = 8  # names listed per kind of mismatch


class WeightNames(NamedTuple):
    """One row of a family's table: the same tensor here, in Hugging Face checkpoints and in GGUF; `*` is the layer."""

    path: str
    hf: str
    gguf: str


class StoredTensor(NamedTuple):
    """How a file keeps one tensor: its name there, and what differs from the parameter."""

    name: str
    add: float = 0.0  # added to every element
    heads: int = 0  # nonzero: rows of so many heads, each permuted for interleaved rotary pairs
    first: int = 0  # row at which it begins, where several are joined to one tensor
    rows: int = 0  # of that tensor; 0: it stands alone


class Checkpoint(NamedTuple):
    """A parsed model file, before any weight is read."""

    path: Path
    config: Config
    tensors: Mapping[str, TensorLocation | LazyTensor]
    stored: dict[str, StoredTensor]  # by parameter path, `*` for the layer
    ignored: Callable[[str], bool] = lambda name: False  # tensors that no parameter needs


class Parameter(NamedTuple):
    """One parameter array and the stored tensors that fill it: one, or one per layer if layers are stacked."""

    keys: tuple
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[StoredTensor, ...]
    stacked: bool
    sharding: Any = None  # None: of the default device
    copies: int = 1  # of each key/value head, which the file has once

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one stored tensor, as the file must have it."""
        shape = self.shape[1:] if self.stacked else self.shape
        return (shape[0] // self.copies, *shape[1:])


class DevicePart(NamedTuple):
    """What one device, or several that hold the same, get of a parameter."""

    where: tuple[slice, ...]  # of the parameter
    values: np.ndarray
    devices: tuple[jax.Device | None, ...]


def check(checkpoint: Checkpoint) -> None:
    """Compare what the file has with what the model wants, before anything of that size is made.

    Raises: UsageError that lists every tensor that is missing, superfluous or wrongly shaped.
    """
    tensors, missing, wrong = checkpoint.tensors, [], []
    needed = set()
    # Layers in one array each: a thousand of them apart are traced for a minute.
    stacked = dataclasses.replace(checkpoint.config, stacked=True)
    for leaf in list_parameters(checkpoint._replace(config=stacked)):
        for part in leaf.parts:
            want = (part.rows or leaf.row_shape[0], *leaf.row_shape[1:])
            needed.add(part.name)
            if part.name not in tensors:
                missing.append(part.name)
            elif tensors[part.name].shape != want:
                wrong.append(f"{part.name} is {quote(list(tensors[part.name].shape))}, not {list(want)}")
    extra = sorted(name for name in tensors if name not in needed and not checkpoint.ignored(name))
    once = lambda names: list(dict.fromkeys(names))  # a joined tensor was asked for by each of its parts
    refuse_tensors(checkpoint.path, once(missing), once(wrong), extra)


def refuse_tensors(path: Path, missing: list[str], wrong: list[str], extra: list[str]) -> None:
    """Raises: UsageError with the names of the tensors that are not as they should be, if there are any."""
    faults = [
        f"{len(names)} {kind} ({_some(names)})"
        for kind, names in (("missing", missing), ("wrongly shaped", wrong), ("unexpected", extra))
        if names
    ]
    if faults:
        raise UsageError(shorten(f"the tensors of {path} do not fit its configuration: {'; '.join(faults)}", SENTENCE))


def assemble(checkpoint: Checkpoint, mesh: Mesh | None = None, over: tuple[str, ...] | None = None) -> PyTree:
    """The parameters of a checked checkpoint; with a mesh those of `specjax.shard`, each device's part alone."""
    params: dict = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for leaf in sorted(list_parameters(checkpoint, mesh, over), key=lambda leaf: -math.prod(leaf.shape)):
            insert(params, leaf.keys, fill(leaf, checkpoint.tensors, pool, checkpoint.config.head_dim))
    return params


def list_parameters(
    checkpoint: Checkpoint, mesh: Mesh | None = None, over: tuple[str, ...] | None = None
) -> Iterator[Parameter]:
    """The parameters that the model wants, with the names of their tensors in the file."""
    config = checkpoint.config
    wide, layout = (config, None) if mesh is None else shard_config(config, mesh, over)
    shapes = abstract_params(wide)
    shardings = jax.tree.map(lambda x: None, shapes) if layout is None else layout.params(shapes)
    flat = jax.tree_util.tree_flatten_with_path(shapes)[0]
    for (path, struct), sharding in zip(flat, jax.tree.leaves(shardings, is_leaf=lambda x: x is None), strict=True):
        keys = tuple(entry.key for entry in path)
        in_stack = config.stacked and keys[0] == "layers"
        layers = range(struct.shape[0]) if in_stack else [k for k in keys if isinstance(k, int)] or [0]
        names = ["*" if isinstance(key, int) else key for key in keys]
        stored = checkpoint.stored[".".join(["layers", "*", *names[1:]] if in_stack else names)]
        parts = tuple(stored._replace(name=stored.name.replace("*", str(layer))) for layer in layers)
        copies = wide.num_kv_heads // config.num_kv_heads if has_kv_head_rows(config, keys[-2]) else 1
        yield Parameter(keys, struct.shape, struct.dtype, parts, in_stack, sharding, copies)


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(shorten(name, QUOTED) for name in names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def fill(
    leaf: Parameter, tensors: Mapping[str, TensorLocation | LazyTensor], pool: ThreadPoolExecutor, head_dim: int = 1
) -> jax.Array:
    """Read, convert and place all parts of one parameter, a chunk of rows per task."""
    pieces = _pieces(leaf)
    tasks = []
    for layer, part in enumerate(leaf.parts):
        tensor = tensors[part.name]
        source = _source_rows(leaf, part, head_dim)
        slots = [
            (piece.where[leaf.stacked :], piece.values[layer] if leaf.stacked else piece.values) for piece in pieces
        ]
        step = max(1, CHUNK // math.prod(tensor.shape[1:]))
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            tasks.append(pool.submit(_place, slots, tensor, start, stop, part.add, source))
    for task in tasks:
        task.result()
    placed = [jax.device_put(piece.values, device) for piece in pieces for device in piece.devices]
    if leaf.sharding is None:
        return placed[0]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)


def _pieces(leaf: Parameter) -> list[DevicePart]:
    """Of the devices of this process."""
    whole = tuple(slice(0, size) for size in leaf.shape)
    found: dict[tuple, list] = {}
    if leaf.sharding is None:
        found[tuple((s.start, s.stop) for s in whole)] = [None]
    else:
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            bounds = (part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
            found.setdefault(tuple(bounds), []).append(device)
    return [
        DevicePart(
            tuple(slice(*pair) for pair in where), _aligned([b - a for a, b in where], leaf.dtype), tuple(devices)
        )
        for where, devices in found.items()
    ]


def _source_rows(leaf: Parameter, part: StoredTensor, head_dim: int) -> np.ndarray | None:
    """int[rows]: the stored row of each row of the parameter; None if they are the same."""
    if not part.heads and not part.rows and leaf.copies == 1:
        return None
    rows = part.first + np.arange(leaf.row_shape[0])
    if part.heads:  # stored pairs (2i, 2i + 1) of a head are rows i and i + h/2
        rows = rows.reshape(part.heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return rows if leaf.copies == 1 else np.repeat(rows.reshape(-1, head_dim), leaf.copies, 0).reshape(-1)


def _place(
    slots: list, tensor: TensorLocation | LazyTensor, start: int, stop: int, add: float, source: np.ndarray | None
) -> None:
    """Stored rows `start:stop` to where they belong. What is added is added in float32, before rounding."""
    wanted: list[tuple] = []
    for (rows, *others), values in slots:
        if source is None:
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                wanted.append(
                    (values, slice(low - rows.start, high - rows.start), slice(low - start, high - start), others)
                )
        else:
            here = source[rows]
            places = np.flatnonzero((here >= start) & (here < stop))
            if places.size:
                wanted.append((values, places, here[places] - start, others))
    if not wanted:
        return
    read = read_rows(tensor, start, stop)
    read = read + np.float32(add) if add else read
    for values, places, chosen, others in wanted:
        values[places] = read[(chosen, *others)]


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose memory jax can adopt."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def insert(params: dict, keys: tuple, leaf: jax.Array) -> None:
    """Put a parameter where it belongs in a nested dict."""
    for key in keys[:-1]:
        params = params.setdefault(key, {})
    params[keys[-1]] = leaf
