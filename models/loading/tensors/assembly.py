"""Assembly of stored tensors to the parameters of a model, one tensor at a time.

The largest tensors come first, so that the scratch memory of the biggest is never needed on top of a full model. On CPU
the arrays that are filled here *become* the parameters (jax aliases aligned memory), so no weight exists twice. With a
mesh each process fills only the parts of its own devices, and reads only the rows for them. No process reads a whole
model.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from specjax.models.storage import JOINED, rows_in_joined
from specjax.types import PyTree

ALIGNMENT = 64  # bytes; jax copies numpy memory that is less aligned
CHUNK_ELEMENTS = 1 << 17  # elements dequantised at a time, so that the scratch arrays stay in the CPU cache
MAX_NAMES = 8  # names that an error lists per kind of mismatch


class WeightNames(NamedTuple):
    """A row of a family's table: the path of a parameter, and its names in Hugging Face checkpoints and in GGUF.

    `*` stands for the layer.
    """

    path: str
    hf: str
    gguf: str


class StoredTensor(NamedTuple):
    """The form of one tensor in a file: its name, and how it differs from the parameter."""

    name: str
    add: float = 0.0  # added to every element
    heads: int = 0  # nonzero: the rows belong to this many heads, each permuted for interleaved rotary pairs
    first: int = 0  # first row of this tensor in a joined tensor of the file
    rows: int = 0  # rows of the joined tensor; 0: the tensor is not joined


class Checkpoint(NamedTuple):
    """A parsed model file, before any weight is read."""

    path: Path
    config: Config
    tensors: Mapping[str, TensorLocation | LazyTensor]
    stored: dict[str, StoredTensor]  # by parameter path, `*` for the layer
    ignored: Callable[[str], bool] = lambda name: False  # tensors that no parameter needs


class Part(NamedTuple):
    """A stored tensor, and the part of a parameter that it fills."""

    stored: StoredTensor
    layer: int = 0  # index in a stack of layers
    rows: np.ndarray | None = None  # int[n], rows of one member of a joined parameter; None: all
    copies: int = 1  # of each key/value head; the file has one


class Parameter(NamedTuple):
    """A parameter array and its parts: one, or one per layer of a stack and per member of a joined parameter."""

    keys: tuple
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Part, ...]
    stacked: bool
    sharding: Any = None  # None: on the default device

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Return the shape of one layer."""
        return self.shape[1:] if self.stacked else self.shape

    def stored_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of the stored rows of a part."""
        rows, *columns = self.layer_shape
        return ((rows if part.rows is None else len(part.rows)) // part.copies, *columns)


class DevicePart(NamedTuple):
    """The part of a parameter on one device, or on several devices with equal parts."""

    where: tuple[slice, ...]  # its slices of the parameter
    values: np.ndarray
    devices: tuple[jax.Device | None, ...]


def check_tensors(checkpoint: Checkpoint) -> None:
    """Compare the tensors of the file with those that the model needs, before any large array is allocated.

    Raises: UsageError that lists every tensor that is missing, superfluous or has the wrong shape.
    """
    tensors, missing, wrong = checkpoint.tensors, [], []
    required = set()
    # Stack the layers, because tracing a thousand separate layers takes a minute.
    stacked = dataclasses.replace(checkpoint.config, stacked=True)
    for parameter in list_parameters(checkpoint._replace(config=stacked)):
        for part in parameter.parts:
            name, (num_rows, *columns) = part.stored.name, parameter.stored_shape(part)
            expected_shape = (part.stored.rows or num_rows, *columns)
            required.add(name)
            if name not in tensors:
                missing.append(name)
            elif tensors[name].shape != expected_shape:
                wrong.append(f"{name} is {quote(list(tensors[name].shape))}, not {list(expected_shape)}")
    extra = sorted(name for name in tensors if name not in required and not checkpoint.ignored(name))
    unique = lambda names: list(dict.fromkeys(names))  # a joined tensor occurs once per part
    refuse_tensors(checkpoint.path, unique(missing), unique(wrong), extra)


def refuse_tensors(path: Path, missing: list[str], wrong: list[str], extra: list[str]) -> None:
    """Check that these lists of faulty tensors are empty.

    Raises: UsageError with the names in them.
    """
    faults = [
        f"{len(names)} {kind} ({_first_names(names)})"
        for kind, names in (("missing", missing), ("wrongly shaped", wrong), ("unexpected", extra))
        if names
    ]
    if faults:
        raise UsageError(shorten(f"the tensors of {path} do not fit its configuration: {'; '.join(faults)}", SENTENCE))


def assemble(checkpoint: Checkpoint, mesh: Mesh | None = None, over: tuple[str, ...] | None = None) -> PyTree:
    """Read the parameters of a checked checkpoint. With a mesh they are sharded as in `specjax.shard`."""
    params: dict = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for parameter in sorted(
            list_parameters(checkpoint, mesh, over), key=lambda parameter: -math.prod(parameter.shape)
        ):
            insert(params, parameter.keys, fill(parameter, checkpoint.tensors, pool, checkpoint.config.head_dim))
    return params


def list_parameters(
    checkpoint: Checkpoint, mesh: Mesh | None = None, over: tuple[str, ...] | None = None
) -> Iterator[Parameter]:
    """Yield the parameters of the model, with the names of their tensors in the file."""
    config = checkpoint.config
    full_config, layout = (config, None) if mesh is None else shard_config(config, mesh, over)
    shapes = abstract_params(full_config)
    shardings = jax.tree.map(lambda x: None, shapes) if layout is None else layout.params(shapes)
    flat = jax.tree_util.tree_flatten_with_path(shapes)[0]
    for (path, shape_dtype), sharding in zip(
        flat, jax.tree.leaves(shardings, is_leaf=lambda x: x is None), strict=True
    ):
        keys = tuple(entry.key for entry in path)
        in_stack = config.stacked and keys[0] == "layers"
        layers = range(shape_dtype.shape[0]) if in_stack else [k for k in keys if isinstance(k, int)] or [0]
        shape = shape_dtype.shape
        members = _members(full_config, keys, shape[1] if in_stack else shape[0])
        parts = []
        for (name, rows), (place, layer) in itertools.product(members.items(), enumerate(layers)):
            fields = ["*" if isinstance(key, int) else key for key in (*keys[:-2], name, keys[-1])]
            stored = checkpoint.stored[".".join(["layers", "*", *fields[1:]] if in_stack else fields)]
            stored = stored._replace(name=stored.name.replace("*", str(layer)))
            copies = full_config.num_kv_heads // config.num_kv_heads if has_kv_head_rows(config, name) else 1
            parts.append(Part(stored, place, rows, copies))
        yield Parameter(keys, shape, shape_dtype.dtype, tuple(parts), in_stack, sharding)


def _members(config: Config, keys: tuple, num_rows: int) -> dict[str, np.ndarray | None]:
    """Return the stored modules of the parameter at `keys`, and the rows of each. None: all rows."""
    name = keys[-2]
    if name not in JOINED:
        return {name: None}
    return {member: rows_in_joined(config, name, member, num_rows) for member in JOINED[name]}


def _first_names(names: list[str]) -> str:
    num_more = len(names) - MAX_NAMES
    return ", ".join(shorten(name, QUOTED) for name in names[:MAX_NAMES]) + (
        f" and {num_more} more" if num_more > 0 else ""
    )


def fill(
    parameter: Parameter,
    tensors: Mapping[str, TensorLocation | LazyTensor],
    pool: ThreadPoolExecutor,
    head_dim: int = 1,
) -> jax.Array:
    """Read, convert and place all parts of one parameter, with one task per chunk of rows."""
    device_parts = _device_parts(parameter)
    tasks = []
    for part in parameter.parts:
        tensor = tensors[part.stored.name]
        source = _source_rows(parameter, part, head_dim)
        destinations = [
            (
                device_part.where[parameter.stacked :],
                device_part.values[part.layer] if parameter.stacked else device_part.values,
            )
            for device_part in device_parts
        ]
        chunk_rows = max(1, CHUNK_ELEMENTS // math.prod(tensor.shape[1:]))
        for start in range(0, tensor.shape[0], chunk_rows):
            stop = min(start + chunk_rows, tensor.shape[0])
            tasks.append(pool.submit(_write_rows, destinations, tensor, start, stop, part.stored.add, source))
    for task in tasks:
        task.result()
    device_arrays = [
        jax.device_put(device_part.values, device) for device_part in device_parts for device in device_part.devices
    ]
    if parameter.sharding is None:
        return device_arrays[0]
    return jax.make_array_from_single_device_arrays(parameter.shape, parameter.sharding, device_arrays)


def _device_parts(parameter: Parameter) -> list[DevicePart]:
    """Allocate the parts of a parameter on the devices of this process."""
    full_index = tuple(slice(0, size) for size in parameter.shape)
    devices_by_index: dict[tuple, list] = {}
    if parameter.sharding is None:
        devices_by_index[tuple((s.start, s.stop) for s in full_index)] = [None]
    else:
        for device, slices in parameter.sharding.addressable_devices_indices_map(parameter.shape).items():
            bounds = (part.indices(size)[:2] for part, size in zip(slices, parameter.shape, strict=True))
            devices_by_index.setdefault(tuple(bounds), []).append(device)
    return [
        DevicePart(
            tuple(slice(*pair) for pair in index),
            _aligned_array([b - a for a, b in index], parameter.dtype),
            tuple(devices),
        )
        for index, devices in devices_by_index.items()
    ]


def _source_rows(parameter: Parameter, part: Part, head_dim: int) -> np.ndarray | None:
    """Return the stored row of each row of the parameter, int[rows]; None if they are the same.

    Rows of other members of a joined parameter get -1.
    """
    stored = part.stored
    if not stored.heads and not stored.rows and part.copies == 1 and part.rows is None:
        return None
    source = stored.first + np.arange(parameter.stored_shape(part)[0])
    if stored.heads:  # stored pairs (2i, 2i + 1) of a head are rows i and i + h/2
        source = source.reshape(stored.heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if part.copies > 1:
        source = np.repeat(source.reshape(-1, head_dim), part.copies, 0).reshape(-1)
    if part.rows is None:
        return source
    of_joined = np.full(parameter.layer_shape[0], -1)
    of_joined[part.rows] = source
    return of_joined


def _write_rows(
    destinations: list,
    tensor: TensorLocation | LazyTensor,
    start: int,
    stop: int,
    add: float,
    source: np.ndarray | None,
) -> None:
    """Read the stored rows `start:stop` and write them to their destinations.

    `add` is added in float32, before rounding.
    """
    copies: list[tuple] = []
    for (rows, *columns), array in destinations:
        if source is None:
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                copies.append(
                    (array, slice(low - rows.start, high - rows.start), slice(low - start, high - start), columns)
                )
        else:
            stored_rows = source[rows]
            target_rows = np.flatnonzero((stored_rows >= start) & (stored_rows < stop))
            if target_rows.size:
                copies.append((array, target_rows, stored_rows[target_rows] - start, columns))
    if not copies:
        return
    values = read_rows(tensor, start, stop)
    values = values + np.float32(add) if add else values
    for array, target_rows, source_rows, columns in copies:
        array[target_rows] = values[(source_rows, *columns)]


def _aligned_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an array whose memory jax can adopt."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def insert(params: dict, keys: tuple, parameter: jax.Array) -> None:
    """Insert a parameter into a nested dict at the path `keys`."""
    for key in keys[:-1]:
        params = params.setdefault(key, {})
    params[keys[-1]] = parameter
