"""GGUF files: one file with metadata, tokenizer and (mostly quantised) tensors.

This module parses the header itself. `gguf.GGUFReader` makes a numpy array per vocabulary entry (15 s for the 262,144
of Gemma). Only the dequantisation comes from that package.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import check_file, quote
from specjax.models.loading.families import registry, rope
from specjax.models.loading.families.config_fields import LAYERS, ROWS, ConfigFields
from specjax.models.loading.families.unread_fields import warn_of_unread
from specjax.models.loading.formats.ggml_blocks import quantized_tensor
from specjax.models.loading.mtp_dialects import GGUF, NativeModule, describe, owner
from specjax.models.loading.tensors.assembly import Checkpoint
from specjax.models.loading.tensors.tensors import TensorLocation, check_sizes, read_rows

T = TypeVar("T")

MAGIC = b"GGUF"
OLD_MAGICS = b"lmgg", b"fmgg", b"tjgg", b"algg"  # ggml, ggmf, ggjt and its adapter ggla, in reverse
STRING, ARRAY = 8, 9  # nested arrays, which the format allows and no model has, are not read
MAX_DIMENSIONS = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read(file: Path, **options) -> tuple[Checkpoint, dict]:
    """Parse a file. Return the checkpoint and its metadata, which include the tokenizer.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    meta, tensors = read_header(file)
    where = str(file)
    _check_whole_model(meta, where)
    arch = ConfigFields(meta, where, "general.").text("architecture", "unnamed")
    family = registry.by_gguf(arch, where)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    factors = {name: read_rows(tensors[name], 0, shapes[name][0]) for name in rope.GGUF_DIVISORS if name in tensors}
    fields = _without_modules(ConfigFields(meta, where, f"{arch}."))
    config = family.config_from_gguf(fields, shapes, factors, **options)
    warn_of_unread(fields)
    owned, native = owner(GGUF, config.num_layers), _module_in(file, tensors, config.num_layers)
    stored = {name: quantized_tensor(name, tensor) for name, tensor in tensors.items() if not owned(name)}
    form = family.stored_gguf(config, arch)
    if hasattr(family, "earlier_gguf"):
        form |= family.earlier_gguf(config, shapes)
    find_unused = getattr(family, "unused_gguf", None)
    ignored = {*rope.GGUF_DIVISORS, *(() if find_unused is None else find_unused(config))}
    return Checkpoint(file, config, stored, form, ignored.__contains__, native), meta


def find_module(file: Path, num_layers: int) -> NativeModule | None:
    """Return the multi-token-prediction module of a file whose model has this number of layers, or None."""
    return _module_in(file, read_header(file)[1], num_layers)


def _module_in(file: Path, names: Collection[str], num_layers: int) -> NativeModule | None:
    owned = list(filter(owner(GGUF, num_layers), names))
    return describe(str(file.resolve()), GGUF, owned) if owned else None


def _without_modules(fields: ConfigFields) -> ConfigFields:
    """Return the fields with a `block_count` that leaves out modules for multi-token prediction."""
    count = fields.size(GGUF.field, 0, minimum=0, maximum=LAYERS)
    if not count:
        return fields
    layers = fields.size("block_count", minimum=count + 1, maximum=LAYERS) - count
    return dataclasses.replace(fields, values={**fields.values, fields.prefix + "block_count": layers})


def _check_whole_model(meta: dict[str, Any], where: str) -> None:
    """Raise a UsageError for a part of a model, an adapter or other contents."""
    parts = ConfigFields(meta, where, "split.")
    if parts.size("count", 1, minimum=0) > 1:
        raise UsageError(
            f"{where} is part {parts.size('no', 0, minimum=0) + 1} of {parts.size('count')} of a split GGUF file; "
            "merge the parts with llama-gguf-split --merge, and give the result"
        )
    kind = ConfigFields(meta, where, "general.").text("type", "model")
    if kind == "adapter":
        raise UsageError(f"{where} is an adapter, not a model; merge it into its base model, and give the result")
    if kind != "model":
        raise UsageError(f"{where} contains {quote(kind)}, not a language model; give the file of the model")


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, TensorLocation]]:
    """Read the metadata and the table of tensors."""
    check_file(file)
    size = file.stat().st_size
    with open(file, "rb") as handle:
        start = handle.read(4)
        if start in OLD_MAGICS:
            raise UsageError(f"{file} has the format {start[::-1].decode()}, which is older than GGUF; download a GGUF")
        if start != MAGIC:
            raise UsageError(f"{file} is not a GGUF file: it does not start with the letters GGUF")
        if size < 24:
            raise UsageError(f"{file} is cut short: it ends within its header; download it again")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data, file)


def _parse(data: mmap.mmap, file: Path) -> tuple[dict[str, Any], dict[str, TensorLocation]]:
    cursor = _Cursor(data, 4)
    try:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise UsageError(f"{file} has GGUF version {version} (or is big-endian); specjax reads versions 2 and 3")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        meta = _unique_entries(((cursor.string(), cursor.field()) for _ in range(num_fields)), file)
        infos = _unique_entries((cursor.tensor_info() for _ in range(num_tensors)), file)
    except (struct.error, KeyError, UnicodeDecodeError):
        raise UsageError(f"{file} is cut short or damaged: its header cannot be read; download it again") from None
    alignment = ConfigFields(meta, str(file), "general.").size("alignment", 32)
    if alignment % 8 or alignment & (alignment - 1):
        raise UsageError(f"{file} has general.alignment {alignment}, which must be a power of two of at least 8")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: TensorLocation(file, start + offset, shape, kind) for name, (shape, kind, offset) in infos.items()}
    check_sizes(tensors, file)
    _check_offsets(tensors, start, alignment, file)
    return meta, tensors


def _unique_entries(pairs: Iterable[tuple[str, T]], file: Path) -> dict[str, T]:
    entries: dict[str, T] = {}
    for name, value in pairs:
        if name in entries:
            raise UsageError(f"{file} has two entries with the name {quote(name)}; download it again")
        entries[name] = value
    return entries


def _check_offsets(tensors: dict[str, TensorLocation], start: int, alignment: int, file: Path) -> None:
    """Check that tensors do not overlap and start at aligned offsets.

    Raises: UsageError if they do not.
    """
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda entry: (entry[1].offset, entry[1].num_bytes)):
        if tensor.offset < end or (tensor.offset - start) % alignment:
            raise UsageError(f"{file} has the tensor {quote(name)} at an invalid offset; download it again")
        end = tensor.offset + tensor.num_bytes


class _Cursor:
    """A position in the header that advances as values are read."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def scalar(self, code: str):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def bytes(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise struct.error("past the end")
        self.at += size
        return self.data[self.at - size : self.at]

    def string(self) -> str:
        return self.bytes(self.scalar("Q")).decode("utf-8")

    def field(self):
        """Read the type of a value, and then the value."""
        return self.value(self.scalar("I"))

    def value(self, kind: int):
        if kind == STRING:
            # A vocabulary may contain pieces that are not valid UTF-8 by themselves.
            return self.bytes(self.scalar("Q")).decode("utf-8", "replace")
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, length = self.scalar("I"), self.scalar("Q")
        if length > min(len(self.data), ROWS):  # one entry per token at most
            raise struct.error("past the end")
        if kind == STRING:
            return [self.value(kind) for _ in range(length)]
        dtype = np.dtype("<" + {"b": "i1", "B": "u1"}.get(SCALARS[kind], SCALARS[kind]))
        return np.frombuffer(self.bytes(length * dtype.itemsize), dtype).tolist()

    def tensor_info(self) -> tuple[str, tuple[tuple[int, ...], str, int]]:
        """Read the name of a tensor, and its shape, format, and offset from the start of the data."""
        name, dimensions = self.string(), self.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise struct.error("invalid number of dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        return name, (shape, _kind(self.scalar("I")), self.scalar("Q"))


def _kind(number: int) -> str:
    with optional_import("gguf", "a GGUF file needs"):
        from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"
