"""The quantisation method of a folder, by `quant_method`, and the replacement of its tensors by matrices.

The tensors of the file decide what is quantised, so lists of modules that are not quantised need no patterns. A method
is a module with `PARTS`, the last parts of the names of a matrix's tensors, and `reader`, a function from the fields of
quantization_config to a function from a `StoredMatrix` to the matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote, read_json_object
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.quantized import awq, bitsandbytes, compressed, fp8, gptq, mxfp4
from specjax.models.loading.quantized.stored_matrix import FLOAT8_VALUES, FLOATS, Reader, StoredMatrix
from specjax.models.loading.tensors.tensors import CODES, INTEGERS, StoredArray, TensorLocation, read_rows

METHODS = MappingProxyType(
    {
        "gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": fp8, "bitsandbytes": bitsandbytes,
        "mxfp4": mxfp4,
    }
)  # fmt: skip

FIELDS = "quantization_config", "compression_config"  # the second one is of old files of compressed-tensors
SEPARATE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files that describe quantised weights if config.json does not, and their methods."""


class Quantization(NamedTuple):
    """The quantisation of one folder: names of the tensors of a matrix, and the reader of a matrix."""

    parts: Collection[str]
    read: Reader


def method_of(fields: ConfigFields, folder: Path) -> Quantization | None:
    """Return the quantisation of a folder with this config; None if its weights are floats.

    Raises: UsageError for a method or settings that are not supported.
    """
    settings, default = _settings(fields, folder)
    if settings is None:
        return None
    if default is None and (settings.flag("load_in_4bit") or settings.flag("load_in_8bit")):
        default = "bitsandbytes"
    name = settings.text("quant_method", default or "unnamed")
    if name not in METHODS:
        raise UsageError(
            f"{settings.where} has weights that are quantised by the method {quote(name)}, which specjax does not read "
            f"(only {', '.join(METHODS)}); use the original checkpoint"
        )
    method = METHODS[name]
    read = method.reader(settings)
    _skip_all(settings)
    return Quantization(method.PARTS, read)


def is_quantized_folder(fields: ConfigFields, folder: Path) -> bool:
    """Return True if a folder with this config describes quantised weights."""
    return _settings(fields, folder)[0] is not None


def _settings(fields: ConfigFields, folder: Path) -> tuple[ConfigFields | None, str | None]:
    """Return the fields of the quantisation, and the method if they do not state it."""
    for name in FIELDS:
        if fields.value(name):
            return fields.subfields(name), "compressed-tensors" if name == "compression_config" else None
    for name, method in SEPARATE_FILES.items():
        values = read_json_object(folder / name)
        if values is not None:
            return ConfigFields(values, str(folder / name)), method
    return None, None


def refuse_quantized(fields: ConfigFields) -> None:
    """Raise a UsageError if a config describes quantised weights, for models that are read as floats only."""
    if any(fields.value(name) for name in FIELDS):
        raise UsageError(f"{fields.where} describes quantised weights; use the original checkpoint")


def _skip_all(fields: ConfigFields) -> None:
    """Record all fields as read. Those that a method does not read tell how the file was made."""
    for full_name, value in fields.values.items():
        name = full_name.removeprefix(fields.prefix)
        if isinstance(value, dict):
            _skip_all(fields.subfields(name))
        else:
            fields.skip(name)


def as_matrices(tensors: Mapping[str, TensorLocation], method: Quantization) -> dict[str, StoredArray]:
    """Replace the tensors of each quantised matrix by the matrix, under the name of its module's weight.

    Raises: UsageError for a matrix that cannot be read, or numbers that belong to no matrix.
    """
    result: dict[str, StoredArray] = {}
    matrices: dict[str, dict[str, TensorLocation]] = {}
    for name, tensor in tensors.items():
        module, part = _split(name, method.parts)
        if part:
            matrices.setdefault(module, {})[part] = tensor
        else:
            result[name] = tensor
    for module, parts in matrices.items():
        name = f"{module}.weight"
        if name in result:
            raise UsageError(f"{_file(parts)} has {quote(name)} both as floats and quantised; remove one")
        is_float = parts.keys() == {"weight"} and parts["weight"].kind in FLOATS
        result[name] = parts["weight"] if is_float else method.read(StoredMatrix(module, parts))
    _check_rest(result)
    return result


def matrix_name(name: str, method: Quantization | None) -> str:
    """Return the name under which `as_matrices` stores a tensor, or the matrix that it is a part of."""
    module, part = _split(name, () if method is None else method.parts)
    return f"{module}.weight" if part else name


def _split(name: str, parts: Collection[str]) -> tuple[str, str]:
    """Return the module and the part of a name; the part is empty for a tensor of no quantised matrix."""
    for part in parts:
        suffix = part if part.startswith("_") else f".{part}"
        if name.endswith(suffix):
            return name.removesuffix(suffix), part
    return name, ""


def _file(parts: Mapping[str, TensorLocation]) -> Path:
    return next(iter(parts.values())).file


def _check_rest(tensors: Mapping[str, StoredArray]) -> None:
    """Raise a UsageError for numbers of a byte, and for whole numbers, that belong to no matrix."""
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorLocation) and tensor.kind in {*CODES, *INTEGERS}:
            problem = "without its scale" if tensor.kind in FLOAT8_VALUES else "which is no part of a quantised matrix"
            raise UsageError(f"{tensor.file} has the tensor {quote(name)} of {tensor.kind}, {problem}")


def zero_biases(tensors: Mapping[str, StoredArray]) -> frozenset[str]:
    """Return the names of biases that are zero, beside quantised matrices. Some writers add them to all modules."""
    return frozenset(
        name
        for name, tensor in tensors.items()
        if name.endswith(".bias")
        and len(tensor.shape) == 1
        and not isinstance(tensors.get(f"{name.removesuffix('.bias')}.weight", tensor), TensorLocation)
        and not np.any(read_rows(tensor, 0, tensor.shape[0]))
    )
