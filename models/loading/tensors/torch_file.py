"""Weights that PyTorch saved (`pytorch_model.bin`, `.pt`): a zip of raw storages and a pickle that says what they are.

A pickle is a program. Here it can name a dozen things, none of which does anything but describe a tensor; the first
other name ends the reading. Nothing of PyTorch is imported.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import check_regular, guarded_read, quote
from specjax.models.loading.tensors.tensors import INTEGERS, TensorLocation, block_size, check_sizes, read_integers

MAGIC = b"PK\x03\x04"
LONGEST_PICKLE = 16_000_000  # bytes: what describes the tensors, not they
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
"""What `torch.save` writes. None of these makes room for more than the file has."""
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


def read(file: Path, integers: bool = False) -> dict[str, TensorLocation]:
    """The table of tensors of one file, whose other entries (numbers, texts) are left out.

    integers: there may be tensors of whole numbers among them.

    Raises: UsageError for a file that is none, holds anything but weights, or names anything that could run.
    """
    contents, entries, folder = _contents(file)
    if not isinstance(contents, dict):
        raise UsageError(f"{file} holds no table of weights; save the state_dict")
    with guarded_read(file):
        tensors = {
            name: _tensor(file, name, view, entries.get(f"{folder}data/{view.storage.key}"))
            for name, view in contents.items()
            if isinstance(name, str) and isinstance(view, _View)
        }
    check_sizes(tensors, file, integers)
    return tensors


def read_numbers(file: Path) -> list[int]:
    """A saved list of whole numbers. Raises: UsageError for a file that is none or holds anything else."""
    contents, entries, folder = _contents(file)
    if isinstance(contents, _View):
        entry = entries.get(f"{folder}data/{contents.storage.key}")
        with guarded_read(file):
            tensor = _tensor(file, "the list", contents, entry)
        check_sizes({"the list": tensor}, file, integers=True)
        contents = read_integers(tensor).reshape(-1).tolist() if tensor.kind in INTEGERS else None
    if not isinstance(contents, list) or not all(type(number) is int for number in contents):
        raise UsageError(f"{file} holds no list of whole numbers")
    return contents


def _contents(file: Path) -> tuple[Any, dict[str, zipfile.ZipInfo], str]:
    """What the pickle says, the entries of the zip, and the folder in it where the storages are."""
    check_regular(file)
    with open(file, "rb") as handle:
        if handle.read(4) != MAGIC:
            raise UsageError(f"{file} is not a zip file of PyTorch's (1.6 or newer); load it and save it again")
    with guarded_read(file), zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        places = [name for name in entries if name.endswith("/data.pkl")]
        if len(places) != 1 or entries[places[0]].file_size > LONGEST_PICKLE:
            raise UsageError(f"{file} holds no weights of PyTorch's, or several; give the file of a state_dict")
        folder = places[0].removesuffix("data.pkl")
        order = entries.get(folder + "byteorder")
        if not all(_is_stored(entry) for entry in (entries[places[0]], order) if entry):
            raise UsageError(f"{file} is compressed or damaged; load it and save it again")
        is_little = order is None or (order.file_size <= 16 and archive.read(order) == b"little")
        contents = _Reader(io.BytesIO(archive.read(places[0])), file).load()
    if not is_little:
        raise UsageError(f"{file} was written on a big-endian machine; load it and save it on another")
    return contents, entries, folder


_BUILT_IN: dict[int, Any] = dict(pickle._Unpickler.dispatch)


class _Reader(pickle._Unpickler):
    """Knows how tensors are described, and nothing else.

    The Unpickler written in Python: the one in C makes room for as many remembered values as the file says.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: _BUILT_IN[code] for code in (getattr(pickle, name)[0] for name in OPCODES)
    }

    def __init__(self, data: io.BytesIO, file: Path):
        super().__init__(data)
        self.file = file

    def load_build(self) -> None:
        """An attribute that is set: `_metadata` of a state_dict, which is left out."""
        self.stack.pop()
        if not isinstance(self.stack[-1], collections.OrderedDict):
            raise pickle.UnpicklingError("an attribute is set")

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        _BUILT_IN[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        _BUILT_IN[pickle.SETITEMS[0]](self)

    def _check_keys(self, keys: list[Any]) -> None:
        """Names only: the hash of tuples of tuples can take for ever, where no interrupt is seen."""
        if not all(isinstance(key, str | int) for key in keys):
            raise pickle.UnpicklingError("a table is not by name")

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
            f"{self.file} holds more than weights ({quote(f'{module}.{name}')}), which is not run; save the state_dict"
        )

    def persistent_load(self, saved: Any) -> _Storage:
        kind, storage, key, _, size = saved
        if kind != "storage" or not isinstance(storage, _StorageName) or not isinstance(key, str):
            raise pickle.UnpicklingError("no storage")
        return _Storage(str(storage), key, size)


def _table() -> collections.OrderedDict:
    return collections.OrderedDict()


def _shape(sizes: Any) -> tuple:
    if not isinstance(sizes, tuple | list):
        raise pickle.UnpicklingError("no shape")
    return tuple(sizes)


class _StorageName(str):
    """Of a kind of storage, which a pickle can name and not call."""


def _rebuild(storage: _Storage, first: int, shape: tuple, strides: tuple, *_: Any) -> _View:
    return _View(storage, first, tuple(shape), tuple(strides))


def _tensor(file: Path, name: str, view: _View, entry: zipfile.ZipInfo | None) -> TensorLocation:
    """Where its elements lie. Raises: UsageError if they are not in the file, in order, one after another."""
    kind = KINDS.get(view.storage.kind, view.storage.kind)
    size = block_size(kind)[1] or 1
    numbers = (view.first, view.storage.size, *view.shape, *view.strides)
    if entry is None or not _is_stored(entry) or not all(type(n) is int and n >= 0 for n in numbers):
        raise UsageError(f"{file} has no elements for the tensor {quote(name)}; download it again")
    count, expected = 1, []
    for length in reversed(view.shape):
        expected.append(count)
        count *= length
    if any(
        length > 1 and has != want
        for length, has, want in zip(view.shape, view.strides, reversed(expected), strict=False)
    ):
        raise UsageError(f"{file} has the tensor {quote(name)} transposed or cut; save it with .contiguous()")
    if len(view.strides) != len(view.shape) or (view.first + count) * size > entry.file_size:
        raise UsageError(f"{file} has no elements for the tensor {quote(name)}; download it again")
    return TensorLocation(file, _start(file, entry) + view.first * size, view.shape, kind)


def _is_stored(entry: zipfile.ZipInfo) -> bool:
    """As it is, all of it."""
    is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
    return is_plain and entry.compress_size == entry.file_size


def _start(file: Path, entry: zipfile.ZipInfo) -> int:
    """The first byte of an entry, behind its own header, which is as long as that says."""
    with open(file, "rb") as handle:
        handle.seek(entry.header_offset)
        magic, name, extra = struct.unpack("<4s22xHH", handle.read(30))
    if magic != MAGIC:
        raise UsageError(f"{file} is damaged: an entry does not begin where its table says; download it again")
    return entry.header_offset + 30 + name + extra
