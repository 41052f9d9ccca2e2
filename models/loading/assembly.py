"""From a table of stored tensors to the parameters of a model, one tensor at a time.

The largest come first, so that the scratch memory of the biggest is never on top of a full model. On CPU the arrays
that are filled here *become* the parameters (jax aliases aligned memory), so no weight exists twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.models.bridge import Config, abstract_params
from specjax.models.loading.tensors import Tensor, read_rows
from specjax.types import PyTree

ALIGNMENT = 64  # bytes; jax copies numpy memory that is less aligned
CHUNK = 1 << 17  # elements dequantised at a time: the scratch arrays of one chunk stay in cache
SHOWN = 8  # names listed per kind of mismatch


class Weight(NamedTuple):
    """One row of a family's table: the same tensor here, in Hugging Face checkpoints and in GGUF; `*` is the layer."""

    path: str
    hf: str
    gguf: str


class Stored(NamedTuple):
    """How a file keeps one tensor: its name there, and what differs from the parameter."""

    name: str
    add: float = 0.0  # added to every element
    heads: int = 0  # nonzero: rows of so many heads, each permuted for interleaved rotary pairs


class Checkpoint(NamedTuple):
    """A parsed model file, before any weight is read."""

    path: Path
    config: Config
    tensors: dict[str, Tensor]
    stored: dict[str, Stored]  # by parameter path, `*` for the layer
    ignored: Callable[[str], bool] = lambda name: False  # tensors that no parameter needs


class Leaf(NamedTuple):
    """One parameter array and the stored tensors that fill it: one, or one per layer if layers are stacked."""

    keys: tuple
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Stored, ...]
    stacked: bool


def assemble(checkpoint: Checkpoint) -> PyTree:
    """The parameters of `checkpoint.config`.

    Raises: UsageError that lists every tensor that is missing, superfluous or wrongly shaped.
    """
    leaves = list(_leaves(checkpoint))
    _check(checkpoint, leaves)
    params: dict = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for leaf in sorted(leaves, key=lambda leaf: -math.prod(leaf.shape)):
            _insert(params, leaf.keys, jax.device_put(_fill(leaf, checkpoint.tensors, pool)))
    return params


def _leaves(checkpoint: Checkpoint) -> Iterator[Leaf]:
    """The parameters that the model wants, with the names of their tensors in the file."""
    stacked = checkpoint.config.stacked
    for path, struct in jax.tree_util.tree_flatten_with_path(abstract_params(checkpoint.config))[0]:
        keys = tuple(entry.key for entry in path)
        in_stack = stacked and keys[0] == "layers"
        layers = range(struct.shape[0]) if in_stack else [k for k in keys if isinstance(k, int)] or [0]
        names = ["*" if isinstance(key, int) else key for key in keys]
        stored = checkpoint.stored[".".join(["layers", "*", *names[1:]] if in_stack else names)]
        parts = tuple(stored._replace(name=stored.name.replace("*", str(layer))) for layer in layers)
        yield Leaf(keys, struct.shape, struct.dtype, parts, in_stack)


def _check(checkpoint: Checkpoint, leaves: list[Leaf]) -> None:
    """Compare what the file has with what the model wants."""
    tensors, missing, wrong = checkpoint.tensors, [], []
    needed = set()
    for leaf in leaves:
        want = leaf.shape[1:] if leaf.stacked else leaf.shape
        for part in leaf.parts:
            needed.add(part.name)
            if part.name not in tensors:
                missing.append(part.name)
            elif tensors[part.name].shape != want:
                wrong.append(f"{part.name} is {list(tensors[part.name].shape)}, not {list(want)}")
    extra = sorted(name for name in tensors if name not in needed and not checkpoint.ignored(name))
    faults = [
        f"{len(names)} {kind} ({_some(names)})"
        for kind, names in (("missing", missing), ("wrongly shaped", wrong), ("unexpected", extra))
        if names
    ]
    if faults:
        raise UsageError(f"the tensors of {checkpoint.path} do not fit its configuration: {'; '.join(faults)}")


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _fill(leaf: Leaf, tensors: dict[str, Tensor], pool: ThreadPoolExecutor) -> np.ndarray:
    """Read, convert and place all parts of one parameter, a chunk of rows per task."""
    out = _aligned(leaf.shape, leaf.dtype)
    tasks = []
    for part, slot in zip(leaf.parts, out if leaf.stacked else [out], strict=True):
        tensor = tensors[part.name]
        order = _half_split_rows(tensor.shape[0], part.heads) if part.heads else None
        rows = max(1, CHUNK // math.prod(tensor.shape[1:]))
        for start in range(0, tensor.shape[0], rows):
            stop = min(start + rows, tensor.shape[0])
            tasks.append(pool.submit(_place, slot, tensor, start, stop, part.add, order))
    for task in tasks:
        task.result()
    return out


def _place(slot: np.ndarray, tensor: Tensor, start: int, stop: int, add: float, order: np.ndarray | None) -> None:
    """Rows `start:stop` of a tensor into the parameter. What is added is added in float32, before rounding."""
    rows = read_rows(tensor, start, stop)
    slot[slice(start, stop) if order is None else order[start:stop]] = rows + np.float32(add) if add else rows


def _half_split_rows(num_rows: int, heads: int) -> np.ndarray:
    """int[num_rows]: where each stored row goes. Stored pairs (2i, 2i + 1) of a head become rows i and i + h/2."""
    return np.arange(num_rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose memory jax can adopt."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _insert(params: dict, keys: tuple, leaf: jax.Array) -> None:
    for key in keys[:-1]:
        params = params.setdefault(key, {})
    params[keys[-1]] = leaf
