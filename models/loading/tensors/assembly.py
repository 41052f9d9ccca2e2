"""Assembly of stored tensors to the parameters of a model, one tensor at a time.

The largest tensors come first, so that the scratch memory of the biggest is never needed on top of a full model. On CPU
the arrays that are filled here *become* the parameters (jax aliases aligned memory), so no weight exists twice. With a
mesh each process fills only the parts of its own devices, and reads only the rows for them. No process reads a whole
model.
"""

from __future__ import annotations

import dataclasses
import functools
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
from specjax.models.loading.tensors.tensors import (
    StoredArray,
    as_vector,
    join_heads,
    read_quantized_rows,
    read_rows,
    select_expert,
    transpose,
)
from specjax.models.storage import JOINED, format_of, is_of_experts, rows_in_joined
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat
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


class Change(NamedTuple):
    """A function of float32 elements between a file and a parameter, in both directions."""

    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


class StoredTensor(NamedTuple):
    """The form of one tensor in a file: its name, and how it differs from the parameter.

    In the name, `*` stands for the layer and `#` for the expert.
    """

    name: str
    add: float = 0.0  # added to every element
    heads: int = 0  # nonzero: the rows belong to this many heads, each permuted for interleaved rotary pairs
    first: int = 0  # first row of this tensor in a joined tensor of the file
    rows: int = 0  # rows of the joined tensor; 0: the tensor is not joined
    order: np.ndarray | None = None  # int[rows], the row of the file, from `first` on, of each row of the parameter
    columns: np.ndarray | None = None  # int[columns], the column of the file of each column of the parameter
    change: Change | None = None  # applied to every element
    unit_axis: bool = False  # the file has an axis of size 1 before the last one
    flat: bool = False  # the file has a vector as a matrix of any shape
    stacked: bool = False  # the file has the matrices or vectors of all experts in one tensor, with their axis first
    transposed: bool = False  # the file has the matrix [in, out]
    of_heads: int = 0  # nonzero: the file has the matrix of each of this many heads, with their axis first
    expert: int | None = None  # the expert whose part of a stacked tensor this is; None: the tensor is not stacked

    def shape_in_file(self, rows: int, columns: Sequence[int], num_experts: int) -> tuple[int, ...]:
        """Return the shape of the tensor of a parameter with so many rows, [E, ...] if the file stacks experts."""
        shape = ((self.rows or rows) // (self.of_heads or 1), *[1] * self.unit_axis, *columns)
        if self.of_heads:
            return (self.of_heads, *(shape[::-1] if self.transposed else shape))
        return ((num_experts,) if self.stacked else ()) + (shape[::-1] if self.transposed else shape)

    def select(self, tensor: StoredArray) -> StoredArray:
        """Return the part of a stored tensor that this names, with rows as those of the parameter."""
        tensor = as_vector(tensor) if self.flat else tensor
        if self.of_heads:
            return join_heads(tensor, transposed=self.transposed)
        tensor = tensor if self.expert is None else select_expert(tensor, self.expert)
        return transpose(tensor) if self.transposed else tensor


class Checkpoint(NamedTuple):
    """A parsed model file, before any weight is read."""

    path: Path
    config: Config
    tensors: Mapping[str, StoredArray]
    stored: dict[str, StoredTensor]  # by parameter path, `*` for the layer
    ignored: Callable[[str], bool] = lambda name: False  # tensors that no parameter needs
    native: Any = None  # `NativeModule` of a multi-token-prediction module in the same files


class Part(NamedTuple):
    """A stored tensor, and the part of a parameter that it fills."""

    stored: StoredTensor
    at: tuple[int, ...] = ()  # its layer and its expert, if the parameter has axes of these
    rows: np.ndarray | None = None  # int[n], rows of one member of a joined parameter; None: all
    copies: int = 1  # of each key/value head; the file has one


class Parameter(NamedTuple):
    """A parameter array and its parts: one, or one per layer of a stack, expert, and member of a joined parameter."""

    keys: tuple
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Part, ...]
    num_leading: int = 0  # leading axes: of layers, if they are stacked, and of experts
    sharding: Any = None  # of the array, or of the arrays of a quantised parameter; None: on the default device
    form: WeightFormat | None = None  # None: the parameter is not quantised

    @property
    def num_experts(self) -> int:
        """Return the size of the axis of experts; 0: there is none."""
        return self.shape[self.num_leading - 1] if is_of_experts(self.keys) else 0

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Return the shape of one layer, or of one of its experts."""
        return self.shape[self.num_leading :]

    def stored_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of the stored rows of a part."""
        rows, *columns = self.layer_shape
        return ((rows if part.rows is None else len(part.rows)) // part.copies, *columns)

    def arrays(self) -> PyTree:
        """Return the shape and dtype of the array, or of the arrays of a quantised parameter."""
        if self.form is None:
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        return self.form.shapes(self.shape, np.dtype(self.dtype).name)


class DevicePart(NamedTuple):
    """The part of an array on one device, or on several devices with equal parts."""

    where: tuple[slice, ...]  # its slices of the array
    values: np.ndarray
    devices: tuple[jax.Device | None, ...]


Destination = tuple[tuple[slice, ...], np.ndarray]
"""The slices of an array that a device has, and its memory."""


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
            expected_shape = part.stored.shape_in_file(num_rows, columns, parameter.num_experts)
            required.add(name)
            if name not in tensors:
                missing.append(name)
            elif part.stored.flat:
                if math.prod(tensors[name].shape) != num_rows:
                    wrong.append(f"{name} is {quote(list(tensors[name].shape))}, not {num_rows} numbers")
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
    is_leaf = lambda x: x is None or isinstance(x, QuantizedArray)
    shardings = jax.tree.map(lambda x: None, shapes, is_leaf=is_leaf) if layout is None else layout.params(shapes)
    flat = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_leaf)[0]
    for (path, shape_dtype), sharding in zip(flat, jax.tree.leaves(shardings, is_leaf=is_leaf), strict=True):
        keys = tuple(entry.key for entry in path)
        in_stack = config.stacked and keys[0] == "layers"
        layers = _layers_of(config, keys, shape_dtype.shape[0] if in_stack else 0)
        shape = shape_dtype.shape
        members = _members(full_config, keys, shape[1] if in_stack else shape[0])
        parts = []
        num_experts = shape[in_stack] if is_of_experts(keys) else 0
        for (name, rows), (place, layer), expert in itertools.product(
            members.items(), enumerate(layers), range(num_experts or 1)
        ):
            fields = ["*" if isinstance(key, int) else key for key in (*keys[:-2], name, keys[-1])]
            is_list = "*" in fields  # stacked layers that are all alike have no number in the path
            stored = checkpoint.stored[".".join(["layers", "*", *fields[1:]] if in_stack and not is_list else fields)]
            stored = stored._replace(name=stored.name.replace("*", str(layer)).replace("#", str(expert)))
            stored = stored._replace(expert=expert) if stored.stacked else stored
            copies = full_config.num_kv_heads // config.num_kv_heads if has_kv_head_rows(config, keys, name) else 1
            index = (place,) * in_stack + (expert,) * (num_experts > 0)
            parts.append(Part(stored, index, rows, copies))
        form = format_of(config, keys, shape[in_stack:]) if isinstance(shape_dtype, QuantizedArray) else None
        leading = in_stack + (num_experts > 0)
        yield Parameter(keys, shape, shape_dtype.dtype, tuple(parts), leading, sharding, form)


def _layers_of(config: Config, keys: tuple, repeats: int) -> Sequence[int]:
    """Return the layers of the model whose values a parameter has; [0] for parameters outside of layers.

    repeats: size of the layer axis of stacked parameters; 0: there is none.
    """
    member = next((key for key in keys if isinstance(key, int)), 0)
    return range(member, member + repeats * config.period, config.period) if repeats else [member]


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
    tensors: Mapping[str, StoredArray],
    pool: ThreadPoolExecutor,
    head_dim: int = 1,
) -> Any:
    """Read, convert and place all parts of one parameter, with one task per chunk of rows.

    Returns: an array, or a `QuantizedArray`.
    """
    arrays, structure = jax.tree.flatten(parameter.arrays())
    shardings = [None] * len(arrays) if parameter.sharding is None else jax.tree.leaves(parameter.sharding)
    device_parts = [_device_parts(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]
    tasks = []
    for part in parameter.parts:
        tensor = part.stored.select(tensors[part.stored.name])
        source = _source_rows(parameter, part, head_dim)
        destinations = [
            [_of_layer(piece, parameter, part) for piece in pieces if _has_layer(piece, parameter, part)]
            for pieces in device_parts
        ]
        read = functools.partial(_read_arrays, tensor, part.stored, form=parameter.form)
        chunk_rows = max(1, CHUNK_ELEMENTS // math.prod(tensor.shape[1:]))
        for start in range(0, tensor.shape[0], chunk_rows):
            stop = min(start + chunk_rows, tensor.shape[0])
            tasks.append(pool.submit(_write_rows, destinations, read, start, stop, source))
    for task in tasks:
        task.result()
    placed = [_place(*parts) for parts in zip(arrays, shardings, device_parts, strict=True)]
    return jax.tree.unflatten(structure, placed)


def _has_layer(piece: DevicePart, parameter: Parameter, part: Part) -> bool:
    """Return True if a device has the layer and the expert of `part`. Experts may be split over devices."""
    leading = piece.where[: parameter.num_leading]
    return all(place.start <= at < place.stop for place, at in zip(leading, part.at, strict=True))


def _of_layer(piece: DevicePart, parameter: Parameter, part: Part) -> Destination:
    """Return the slices and the memory of the layer and the expert of `part`."""
    leading = piece.where[: parameter.num_leading]
    at = tuple(at - place.start for place, at in zip(leading, part.at, strict=True))
    return piece.where[parameter.num_leading :], piece.values[at]


def _place(array: jax.ShapeDtypeStruct, sharding: Any, device_parts: list[DevicePart]) -> jax.Array:
    """Return the array whose parts on devices are filled."""
    placed = [jax.device_put(piece.values, device) for piece in device_parts for device in piece.devices]
    if sharding is None:
        return placed[0]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, placed)


def _device_parts(array: jax.ShapeDtypeStruct, sharding: Any) -> list[DevicePart]:
    """Allocate the parts of an array on the devices of this process."""
    devices_by_index: dict[tuple, list] = {}
    if sharding is None:
        devices_by_index[tuple((0, size) for size in array.shape)] = [None]
    else:
        for device, slices in sharding.addressable_devices_indices_map(array.shape).items():
            bounds = (part.indices(size)[:2] for part, size in zip(slices, array.shape, strict=True))
            devices_by_index.setdefault(tuple(bounds), []).append(device)
    return [
        DevicePart(
            tuple(slice(*pair) for pair in index),
            _aligned_array([b - a for a, b in index], array.dtype),
            tuple(devices),
        )
        for index, devices in devices_by_index.items()
    ]


def _source_rows(parameter: Parameter, part: Part, head_dim: int) -> np.ndarray | None:
    """Return the stored row of each row of the parameter, int[rows]; None if they are the same.

    Rows of other members of a joined parameter get -1.
    """
    stored = part.stored
    if not stored.heads and not stored.rows and stored.order is None and part.copies == 1 and part.rows is None:
        return None
    source = stored.first + (np.arange(parameter.stored_shape(part)[0]) if stored.order is None else stored.order)
    if stored.heads:  # stored pairs (2i, 2i + 1) of a head are rows i and i + h/2
        source = source.reshape(stored.heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if part.copies > 1:
        source = np.repeat(source.reshape(-1, head_dim), part.copies, 0).reshape(-1)
    if part.rows is None:
        return source
    of_joined = np.full(parameter.layer_shape[0], -1)
    of_joined[part.rows] = source
    return of_joined


def _read_arrays(
    tensor: StoredArray, stored: StoredTensor, start: int, stop: int, *, form: WeightFormat | None = None
) -> list[np.ndarray]:
    """Read stored rows as the arrays of a parameter. Changes are computed in float32, before rounding."""
    if form is not None:
        return jax.tree.leaves(read_quantized_rows(tensor, start, stop, form, stored.columns))
    rows = read_rows(tensor, start, stop)
    rows = rows[:, 0] if stored.unit_axis else rows
    rows = rows if stored.columns is None else rows[:, stored.columns]
    rows = rows + np.float32(stored.add) if stored.add else rows
    return [rows if stored.change is None else stored.change.read(rows.astype(np.float32))]


def _write_rows(
    destinations: list[list[Destination]],
    read: Callable[[int, int], list[np.ndarray]],
    start: int,
    stop: int,
    source: np.ndarray | None,
) -> None:
    """Read the stored rows `start:stop` and write them to the destinations of each array, if any needs them."""
    copies = [[_rows_to_copy(rows, start, stop, source) for (rows, *_), _ in pieces] for pieces in destinations]
    if not any(target_rows is not None for pieces in copies for target_rows in pieces):
        return
    for values, pieces, places in zip(read(start, stop), destinations, copies, strict=True):
        for ((_, *columns), memory), place in zip(pieces, places, strict=True):
            if place is not None:
                target_rows, source_rows = place
                memory[target_rows] = values[(source_rows, *columns)]


def _rows_to_copy(rows: slice, start: int, stop: int, source: np.ndarray | None) -> tuple[Any, Any] | None:
    """Return the rows of a device's part that `start:stop` contains, and their places in it; None if there are none."""
    if source is None:
        low, high = max(start, rows.start), min(stop, rows.stop)
        return (slice(low - rows.start, high - rows.start), slice(low - start, high - start)) if low < high else None
    stored_rows = source[rows]
    target_rows = np.flatnonzero((stored_rows >= start) & (stored_rows < stop))
    return (target_rows, stored_rows[target_rows] - start) if target_rows.size else None


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
