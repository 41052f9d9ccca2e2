"""Tensors that lie in files: where, how big, how stored; and how to read a few rows of one as float32.

Every format is parsed down to a table of `TensorLocation`s. Rows are then read with plain file reads, chunk by chunk: the pages
of a mapped file would stay resident, and count, until all of it had been read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import quote

SHOWN = 8  # names listed in an error
PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "?"}
"""Storage formats of ids and flags, which are no weights."""


class TensorLocation(NamedTuple):
    """One stored tensor. `kind`: of PLAIN_BYTES or INTEGERS, or the name of a GGML block format such as "Q4_K"."""

    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]  # [out, in] for matrices
    kind: str

    @property
    def num_bytes(self) -> int:
        return bytes_of(self.kind, math.prod(self.shape))


class LazyTensor(NamedTuple):
    """One tensor of a store that reads itself, such as Orbax: `rows(start, stop)` gives rows of it as float32."""

    file: Path
    shape: tuple[int, ...]  # as `TensorLocation`'s
    rows: Callable[[int, int], np.ndarray]


@functools.cache
def block_size(kind: str) -> tuple[int, int]:
    """(elements, bytes) of the smallest unit of a storage format; (0, 0) if it cannot be read."""
    if kind in PLAIN_BYTES:
        return 1, PLAIN_BYTES[kind]
    if kind in INTEGERS:
        return 1, np.dtype(INTEGERS[kind]).itemsize
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
    """Bytes of so many elements."""
    unit, size = block_size(kind)
    return elements // unit * size


def read_rows(tensor: TensorLocation | LazyTensor, start: int, stop: int) -> np.ndarray:
    """float32[stop - start, ...]: rows of a tensor. `start` must fall on a block of the format."""
    if isinstance(tensor, LazyTensor):
        return tensor.rows(start, stop)
    return _float32(_raw(tensor, start, stop), tensor.kind).reshape(stop - start, *tensor.shape[1:])


def read_integers(tensor: TensorLocation) -> np.ndarray:
    """int64 of the tensor's shape, of one whose kind is in INTEGERS."""
    return _raw(tensor, 0, tensor.shape[0]).view(INTEGERS[tensor.kind]).astype(np.int64).reshape(tensor.shape)


def _raw(tensor: TensorLocation, start: int, stop: int) -> np.ndarray:
    """uint8[n]: the bytes of some rows."""
    row = math.prod(tensor.shape[1:])
    size = bytes_of(tensor.kind, (stop - start) * row)
    offset = tensor.offset + bytes_of(tensor.kind, start * row)
    raw = np.fromfile(tensor.file, np.uint8, size, offset=offset)
    if raw.size != size:
        raise UsageError(f"{tensor.file} ends before its tensors do; download it again")
    return raw


def _float32(raw: np.ndarray, kind: str) -> np.ndarray:
    """uint8[n] -> float32[m]."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # Blocks are independent, so one long row is as good as many: fewer and larger numpy calls.
    return dequantize(raw.reshape(1, -1), GGMLQuantizationType[kind]).reshape(-1)


def check_sizes(tensors: dict[str, TensorLocation], file: Path, integers: bool = False) -> None:
    """Refuse storage formats that cannot be read, and a file that is shorter than its own table says.

    integers: formats of whole numbers can be.
    """
    unreadable = lambda kind: block_size(kind)[0] == 0 or (kind in INTEGERS and not integers)
    unknown = sorted({t.kind for t in tensors.values() if unreadable(t.kind)})
    if unknown:
        some = ", ".join(unknown[:SHOWN])
        raise UsageError(f"{file} stores tensors as {some}, which specjax cannot read; use another file")
    for name, t in tensors.items():
        unit = block_size(t.kind)[0]
        if math.prod(t.shape) == 0 or (unit > 1 and t.shape[-1] % unit):
            raise UsageError(
                f"{file} has {quote(name)} of shape {quote(list(t.shape))}, which {t.kind} cannot hold; download it "
                "again"
            )
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=0)
    size = file.stat().st_size
    if end > size:
        raise UsageError(f"{file} is cut short: it has {size:,} bytes and its tensors need {end:,}; download it again")
