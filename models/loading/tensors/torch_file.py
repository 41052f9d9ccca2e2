"""Weights saved by PyTorch (`pytorch_model.bin`, `.pt`): a zip of raw storages and a pickle that describes them.

A pickle is a program. Here it can only name a dozen functions that describe tensors; any other name raises an error.
PyTorch is not imported.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import check_file, guarded_read, quote
from specjax.models.loading.tensors.tensors import INTEGERS, TensorLocation, block_size, check_sizes, read_integers

MAGIC = b"PK\x03\x04"
MAX_PICKLE_BYTES = 16_000_000  # of the description of the tensors, without their elements
OPCODES = [
    "PROTO",
    "FRAME",
    "STOP",
    "GLOBAL",
    "STACK_GLOBAL",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    "BINGET",
    "LONG_BINGET",
    "MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "APPEND",
    "APPENDS",
    "SETITEM",
    "SETITEMS",
    "REDUCE",
    "BUILD",
    "BINPERSID",
]
"""Opcodes that `torch.save` writes. None of them allocates more memory than the file contains."""
KINDS = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64", "IntStorage": "I32",
    "BoolStorage": "BOOL",
}  # fmt: skip
OTHER_STORAGES = "DoubleStorage", "ShortStorage", "CharStorage", "ByteStorage"


class _Storage(NamedTuple):
    """A storage of the file."""

    kind: str
    key: str
    size: int  # elements


class _View(NamedTuple):
    """A tensor: some elements of a storage."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read(file: Path, extra_kinds: Collection[str] = ()) -> dict[str, TensorLocation]:
    """Read the table of tensors of one file. Other entries (numbers, texts) are left out.

    extra_kinds: storage formats that are allowed besides floats, of INTEGERS.

    Raises: UsageError for a file of another kind, one with other contents than weights, or one that names code.
    """
    contents, entries, folder = _read_pickle(file)
    if not isinstance(contents, dict):
        raise UsageError(f"{file} contains no table of weights; save the state_dict")
    with guarded_read(file):
        tensors = {
            name: _locate_tensor(file, name, view, entries.get(f"{folder}data/{view.storage.key}"))
            for name, view in contents.items()
            if isinstance(name, str) and isinstance(view, _View)
        }
    check_sizes(tensors, file, extra_kinds)
    return tensors


def read_vector(file: Path) -> TensorLocation:
    """Read the table of a file with one vector, alone or in a dict with numbers and texts.

    Raises: UsageError for a file of another kind, or one with other tensors.
    """
    contents, entries, folder = _read_pickle(file)
    views = [x for x in (contents.values() if isinstance(contents, dict) else [contents]) if isinstance(x, _View)]
    if len(views) != 1:
        raise UsageError(f"{file} contains {len(views)} tensors, and not one vector; save the vector alone")
    with guarded_read(file):
        tensor = _locate_tensor(file, "the vector", views[0], entries.get(f"{folder}data/{views[0].storage.key}"))
    check_sizes({"the vector": tensor}, file)
    return tensor._replace(shape=(math.prod(tensor.shape),))


def read_numbers(file: Path) -> list[int]:
    """Read a saved list of whole numbers. Raises: UsageError for a file of another kind or with other contents."""
    contents, entries, folder = _read_pickle(file)
    if isinstance(contents, _View):
        entry = entries.get(f"{folder}data/{contents.storage.key}")
        with guarded_read(file):
            tensor = _locate_tensor(file, "the list", contents, entry)
        check_sizes({"the list": tensor}, file, INTEGERS)
        contents = read_integers(tensor).reshape(-1).tolist() if tensor.kind in INTEGERS else None
    if not isinstance(contents, list) or not all(type(number) is int for number in contents):
        raise UsageError(f"{file} contains no list of whole numbers")
    return contents


def _read_pickle(file: Path) -> tuple[Any, dict[str, zipfile.ZipInfo], str]:
    """Return the unpickled contents, the entries of the zip, and the folder in it with the storages."""
    check_file(file)
    with open(file, "rb") as handle:
        if handle.read(4) != MAGIC:
            raise UsageError(f"{file} is not a PyTorch zip file (1.6 or newer); load it in PyTorch and save it again")
    with guarded_read(file), zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1 or entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise UsageError(f"{file} does not contain exactly one PyTorch state_dict; give the file of a state_dict")
        folder = pickles[0].removesuffix("data.pkl")
        order = entries.get(folder + "byteorder")
        if not all(_is_uncompressed(entry) for entry in (entries[pickles[0]], order) if entry):
            raise UsageError(f"{file} is compressed or damaged; load it in PyTorch and save it again")
        is_little = order is None or (order.file_size <= 16 and archive.read(order) == b"little")
        contents = _Reader(io.BytesIO(archive.read(pickles[0])), file).load()
    if not is_little:
        raise UsageError(f"{file} was written on a big-endian machine; save it again on a little-endian one")
    return contents, entries, folder


_DISPATCH: dict[int, Any] = dict(pickle._Unpickler.dispatch)


class _Reader(pickle._Unpickler):
    """An unpickler that can only build descriptions of tensors.

    It extends the Unpickler written in Python. The one in C allocates as many memo entries as the file demands.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: _DISPATCH[code] for code in (getattr(pickle, name)[0] for name in OPCODES)
    }

    def __init__(self, data: io.BytesIO, file: Path):
        super().__init__(data)
        self.file = file

    def load_build(self) -> None:
        """Skip an attribute: `_metadata` of a state_dict."""
        self.stack.pop()
        if not isinstance(self.stack[-1], collections.OrderedDict):
            raise pickle.UnpicklingError("a value other than a state_dict has attributes")

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        _DISPATCH[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        _DISPATCH[pickle.SETITEMS[0]](self)

    def _check_keys(self, keys: list[Any]) -> None:
        """Check that keys are names. Hashing nested tuples can take unlimited time, without checking for interrupts."""
        if not all(isinstance(key, str | int) for key in keys):
            raise pickle.UnpicklingError("a table has keys other than names")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _table
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda view, *_: view
        if (module, name) == ("torch", "Size"):
            return _shape
        if module == "torch" and name in (*KINDS, *OTHER_STORAGES):
            return _StorageName(name)
        raise UsageError(
            f"{self.file} contains code ({quote(f'{module}.{name}')}), which specjax never runs; save the state_dict"
        )

    def persistent_load(self, saved: Any) -> _Storage:
        kind, storage, key, _, size = saved
        if kind != "storage" or not isinstance(storage, _StorageName) or not isinstance(key, str):
            raise pickle.UnpicklingError("not a storage")
        return _Storage(str(storage), key, size)


def _table() -> collections.OrderedDict:
    return collections.OrderedDict()


def _shape(sizes: Any) -> tuple:
    if not isinstance(sizes, tuple | list):
        raise pickle.UnpicklingError("not a shape")
    return tuple(sizes)


class _StorageName(str):
    """The name of a storage type, which a pickle can refer to but not call."""


def _rebuild(storage: _Storage, first: int, shape: tuple, strides: tuple, *_: Any) -> _View:
    return _View(storage, first, tuple(shape), tuple(strides))


def _locate_tensor(file: Path, name: str, view: _View, entry: zipfile.ZipInfo | None) -> TensorLocation:
    """Return the location of a tensor's elements.

    Raises: UsageError if they are not in the file in contiguous order.
    """
    kind = KINDS.get(view.storage.kind, view.storage.kind)
    size = block_size(kind)[1] or 1
    numbers = (view.first, view.storage.size, *view.shape, *view.strides)
    if entry is None or not _is_uncompressed(entry) or not all(type(n) is int and n >= 0 for n in numbers):
        raise UsageError(f"{file} has no elements for the tensor {quote(name)}; download it again")
    count, contiguous_strides = 1, []
    for length in reversed(view.shape):
        contiguous_strides.append(count)
        count *= length
    if any(
        length > 1 and stride != expected
        for length, stride, expected in zip(view.shape, view.strides, reversed(contiguous_strides), strict=False)
    ):
        raise UsageError(
            f"{file} has the tensor {quote(name)} in a transposed or sliced view; save it with .contiguous()"
        )
    if len(view.strides) != len(view.shape) or (view.first + count) * size > entry.file_size:
        raise UsageError(f"{file} has no elements for the tensor {quote(name)}; download it again")
    return TensorLocation(file, _data_offset(file, entry) + view.first * size, view.shape, kind)


def _is_uncompressed(entry: zipfile.ZipInfo) -> bool:
    """Return True if an entry of the zip is stored completely and without compression."""
    is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
    return is_plain and entry.compress_size == entry.file_size


def _data_offset(file: Path, entry: zipfile.ZipInfo) -> int:
    """Return the offset of the data of an entry, after its own header of variable length."""
    with open(file, "rb") as handle:
        handle.seek(entry.header_offset)
        magic, name, extra = struct.unpack("<4s22xHH", handle.read(30))
    if magic != MAGIC:
        raise UsageError(f"{file} is damaged: an entry is not at the offset in its table; download it again")
    return entry.header_offset + 30 + name + extra
