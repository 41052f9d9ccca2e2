"""Location and format of tensors in files, and how to read a few of their rows as float32.

Every format is parsed to a table of `TensorLocation`s. Rows are then read with plain file reads, chunk by chunk. The
pages of a memory-mapped file would stay resident until all of it had been read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import quote
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat, expand_rows, quantize_rows

COMPARED_ROWS = 4096  # rows that are compared at a time
MAX_NAMES = 8  # names that an error lists
INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "?"}
"""Storage formats of ids and flags, which are not weights."""
CODES = {
    "I8": "int8", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Storage formats with a byte per number, which occur in quantised matrices only."""
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "bfloat16", **INTEGERS, **CODES}
"""NumPy's names of the formats without blocks."""


class TensorLocation(NamedTuple):
    """The location of one stored tensor.

    `kind` is a key of DTYPES, or a GGML block format such as "Q4_K".
    """

    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]  # [out, in] for matrices
    kind: str

    @property
    def num_bytes(self) -> int:
        return bytes_of(self.kind, math.prod(self.shape))


class LazyTensor(NamedTuple):
    """A tensor of a store with its own reader, such as Orbax. `rows(start, stop)` returns rows of it as float32."""

    file: Path
    shape: tuple[int, ...]  # as in `TensorLocation`
    rows: Callable[[int, int], np.ndarray]
    obstacle: str = ""  # why a quantised matrix cannot be a `QuantizedTensor`: what it has, as "codes of nf4"


class QuantizedTensor(NamedTuple):
    """A matrix [O, I] that a file stores in few bits, possibly as several tensors.

    `rows(start, stop)` returns rows of it in its format, as arrays of NumPy. Experts have matrices [E, O, I], whose
    rows are counted from the first row of the first one.
    """

    file: Path
    shape: tuple[int, ...]
    form: WeightFormat
    rows: Callable[[int, int], QuantizedArray]


StoredArray = TensorLocation | LazyTensor | QuantizedTensor


@functools.cache
def block_size(kind: str) -> tuple[int, int]:
    """Return (elements, bytes) of the smallest unit of a storage format; (0, 0) if it cannot be read."""
    if kind in DTYPES:
        return 1, jnp.dtype(DTYPES[kind]).itemsize
    with optional_import("gguf", "a GGUF file needs"):
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

    quant = getattr(GGMLQuantizationType, kind, None)
    if quant is None:
        return 0, 0
    elements, size = GGML_QUANT_SIZES[quant]
    try:
        dequantize(np.zeros((1, size), np.uint8), quant)
    except NotImplementedError:
        return 0, 0
    return elements, size


def bytes_of(kind: str, elements: int) -> int:
    """Return the size in bytes of `elements` elements."""
    unit, size = block_size(kind)
    return elements // unit * size


def read_rows(tensor: StoredArray, start: int, stop: int) -> np.ndarray:
    """Read rows of a tensor as float32[stop - start, ...]. `start` must be a multiple of the format's block size."""
    if isinstance(tensor, QuantizedTensor):
        return expand_rows(tensor.rows(start, stop))
    if isinstance(tensor, LazyTensor):
        return tensor.rows(start, stop)
    return _to_float32(read_stored_bytes(tensor, start, stop), tensor.kind).reshape(stop - start, *tensor.shape[1:])


def as_vector(tensor: StoredArray) -> LazyTensor:
    """Return a stored array with its elements in one axis. Every read reads all of it, so it should be small."""
    rows = lambda start, stop: read_rows(tensor, 0, tensor.shape[0]).reshape(-1)[start:stop]
    return LazyTensor(tensor.file, (math.prod(tensor.shape),), rows)


def select_expert(tensor: StoredArray, expert: int) -> StoredArray:
    """Return the matrix [O, I], or the vector [O], of one expert from a tensor with a leading axis of experts."""
    num_rows, shape = tensor.shape[1], tensor.shape[1:]
    if isinstance(tensor, TensorLocation):
        offset = tensor.offset + bytes_of(tensor.kind, expert * math.prod(shape))
        return tensor._replace(offset=offset, shape=shape)
    first = expert * num_rows
    if isinstance(tensor, QuantizedTensor):
        of_experts = tensor.rows
        return tensor._replace(shape=shape, rows=lambda start, stop: of_experts(first + start, first + stop))
    of_matrices = tensor.rows
    return tensor._replace(shape=shape, rows=lambda start, stop: of_matrices(expert, expert + 1)[0][start:stop])


def transpose(tensor: StoredArray) -> LazyTensor:
    """Return the transpose of a matrix of floats. Raises: UsageError for a matrix in another form."""
    if not isinstance(tensor, TensorLocation) or tensor.kind not in DTYPES:
        raise UsageError(f"{tensor.file} has a quantised matrix [in, out], which specjax does not read; use floats")
    matrix = tensor
    rows = lambda start, stop: np.ascontiguousarray(read_columns(matrix, start, stop).astype(np.float32).T)
    return LazyTensor(matrix.file, matrix.shape[::-1], rows)


def join_heads(tensor: StoredArray, *, transposed: bool) -> LazyTensor:
    """Return the matrices [H, O, I] of heads as one matrix [H O, I]. transposed: the file has [H, I, O]."""
    num_heads, *shape = tensor.shape
    num_rows, num_columns = shape[::-1] if transposed else shape

    def rows(start: int, stop: int) -> np.ndarray:
        first, last = start // num_rows, -(-stop // num_rows)
        per_head = shape[0] if isinstance(tensor, QuantizedTensor) else 1  # what `read_rows` counts of each head
        matrices = read_rows(tensor, first * per_head, last * per_head).reshape(last - first, *shape)
        matrices = matrices.swapaxes(1, 2) if transposed else matrices
        return matrices.reshape(-1, num_columns)[start - first * num_rows : stop - first * num_rows]

    return LazyTensor(tensor.file, (num_heads * num_rows, num_columns), rows)


def read_quantized_rows(
    tensor: StoredArray, start: int, stop: int, form: WeightFormat, columns: np.ndarray | None = None
) -> QuantizedArray:
    """Read rows of a matrix in a format. Rows that are stored in another form are rounded to it.

    columns: int[columns], the column of the file of each column of the matrix. A file in the same format must keep the
      columns of a group together, see `groups_in_order`.
    """
    if not isinstance(tensor, QuantizedTensor) or not tensor.form.has_values_of(form):
        values = read_rows(tensor, start, stop)
        return quantize_rows(values if columns is None else values[:, columns], form)
    rows = tensor.rows(start, stop)
    rows = dataclasses.replace(rows, values=rows.values.astype(jnp.dtype(form.values)))
    return rows if columns is None else _reorder_columns(rows, columns)


def _reorder_columns(rows: QuantizedArray, columns: np.ndarray) -> QuantizedArray:
    groups = groups_in_order(columns, len(columns) // rows.scales.shape[1])
    assert groups is not None
    of_groups = lambda x: None if x is None else x[:, groups]
    return dataclasses.replace(
        rows, values=rows.values[:, columns], scales=of_groups(rows.scales), offsets=of_groups(rows.offsets)
    )


def groups_in_order(columns: np.ndarray, size: int) -> np.ndarray | None:
    """Return the group of the file of each group of columns; None if columns of a group come from different groups.

    size: number of columns in a group.
    """
    by_group = columns.reshape(-1, size) // size
    return by_group[:, 0] if (by_group == by_group[:, :1]).all() else None


def equal_values(first: StoredArray, second: StoredArray) -> bool:
    """Return True if two stored matrices have the same shape and values."""
    if first.shape != second.shape:
        return False
    chunks = range(0, first.shape[0], COMPARED_ROWS)
    rows = lambda tensor, start: read_rows(tensor, start, min(start + COMPARED_ROWS, tensor.shape[0]))
    return all(np.array_equal(rows(first, start), rows(second, start), equal_nan=True) for start in chunks)


def read_integers(tensor: TensorLocation) -> np.ndarray:
    """Read a tensor whose kind is in INTEGERS as int64."""
    return (
        read_stored_bytes(tensor, 0, tensor.shape[0]).view(INTEGERS[tensor.kind]).astype(np.int64).reshape(tensor.shape)
    )


def read_stored(tensor: TensorLocation, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Read rows of a tensor whose kind is in DTYPES, in that dtype. The default is the whole tensor."""
    stop = math.prod(tensor.shape[:1]) if stop is None else stop
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    return read_stored_bytes(tensor, start, stop).view(jnp.dtype(DTYPES[tensor.kind])).reshape(shape)


def read_columns(tensor: TensorLocation, start: int, stop: int) -> np.ndarray:
    """Read columns of a matrix whose kind is in DTYPES, in that dtype.

    The file is mapped for the time of the call, so its pages do not stay resident.
    """
    dtype = jnp.dtype(DTYPES[tensor.kind])
    size = dtype.itemsize
    shape = tensor.shape[0], tensor.shape[1] * size
    mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset, shape)
    return np.array(mapped[:, start * size : stop * size]).view(dtype)


def read_stored_bytes(tensor: TensorLocation, start: int, stop: int) -> np.ndarray:
    """Read the bytes uint8[n] of some rows."""
    row = math.prod(tensor.shape[1:])
    size = bytes_of(tensor.kind, (stop - start) * row)
    offset = tensor.offset + bytes_of(tensor.kind, start * row)
    raw = np.fromfile(tensor.file, np.uint8, size, offset=offset)
    if raw.size != size:
        raise UsageError(f"{tensor.file} is cut short: it ends before its last tensor; download it again")
    return raw


def _to_float32(raw: np.ndarray, kind: str) -> np.ndarray:
    """Convert stored bytes uint8[n] to float32[m]."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # Blocks are independent. One long row needs fewer and larger numpy calls than many rows.
    return dequantize(raw.reshape(1, -1), GGMLQuantizationType[kind]).reshape(-1)


def check_sizes(tensors: dict[str, TensorLocation], file: Path, extra_kinds: Collection[str] = ()) -> None:
    """Check that the storage formats can be read, and that the file is as long as its table of tensors.

    extra_kinds: the formats of INTEGERS and CODES that are allowed.

    Raises: UsageError if one of them cannot be read, or the file is too short.
    """
    unreadable = lambda kind: block_size(kind)[0] == 0 or (kind in {*INTEGERS, *CODES} and kind not in extra_kinds)
    unsupported = sorted({t.kind for t in tensors.values() if unreadable(t.kind)})
    if unsupported:
        names = ", ".join(unsupported[:MAX_NAMES])
        raise UsageError(
            f"{file} stores tensors as {names}, which specjax cannot read; use a checkpoint in another format"
        )
    for name, t in tensors.items():
        unit = block_size(t.kind)[0]
        if math.prod(t.shape) == 0 or (unit > 1 and t.shape[-1] % unit):
            raise UsageError(
                f"{file} has the tensor {quote(name)} of shape {quote(list(t.shape))}, which {t.kind} cannot store; "
                "download it again"
            )
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=0)
    size = file.stat().st_size
    if end > size:
        raise UsageError(f"{file} is cut short: it has {size:,} bytes and its tensors need {end:,}; download it again")
