"""compressed-tensors: packed whole numbers, int8 and float8 with scales per tensor, output, group or block.

weight_packed int32[O, words] is packed along the inputs, and contains q + 2^(bits - 1). weight int8 or float8[O, I] is
not packed. weight = weight_scale * (q - weight_zero_point). The zero points are packed along the outputs if the numbers
are packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.quantized import mxfp4
from specjax.models.loading.quantized.block_scales import BlockScales, block_scales
from specjax.models.loading.quantized.float8 import float8_matrix
from specjax.models.loading.quantized.packing import num_words, signed, unpack, words_of
from specjax.models.loading.quantized.stored_matrix import FLOAT8_VALUES, Reader, StoredMatrix, integer_form
from specjax.models.loading.tensors.tensors import StoredArray, TensorLocation, read_stored
from specjax.numerics.quantized_array import FLOAT8, QuantizedArray

PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
    "input_zero_point",
)  # fmt: skip
PACKED, MXFP4, DENSE = "pack-quantized", "mxfp4-pack-quantized", "dense"
FORMATS = PACKED, "int-quantized", "float-quantized", "naive-quantized", MXFP4, DENSE
STRATEGIES = "tensor", "channel", "group", "block"


Numbers = Callable[[int, int], np.ndarray]
"""Function that reads numbers of the outputs from the first to the second argument."""


class _Scheme(NamedTuple):
    """The fields of a group of modules that change their weights or products."""

    bits: int
    strategy: str
    group: int
    block: tuple[int, int]
    inputs: str | None  # see `WeightFormat.inputs`


def reader(fields: ConfigFields) -> Reader:
    """Return the reader of matrices. Raises: UsageError for another format, mixed bits or static activation scales."""
    where = fields.where
    _check_format(fields, where)
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.value(name):
            raise UsageError(f"{where} has {name} in its quantization_config, which specjax does not read")
    sparsity = fields.subfields("sparsity_config").text("format", DENSE)
    if sparsity != DENSE:
        raise UsageError(f"{where} has sparse weights in the format {quote(sparsity)}, which specjax does not read")
    groups = fields.subfields("config_groups")
    names = [name.removeprefix(groups.prefix) for name in groups.values]
    if not names:
        raise UsageError(f"{where} has no config_groups, so the bits of its weights are unknown; download it again")
    settings = {_settings_of(groups.subfields(name)) for name in names}
    if len(settings) > 1:
        raise UsageError(f"{where} has config_groups with several bits or scales; files with mixed bits are not read")
    return functools.partial(_read, settings.pop())


def _check_format(fields: ConfigFields, where: str) -> None:
    name = fields.text("format", PACKED)
    if name not in FORMATS:
        raise UsageError(
            f"{where} has the format {quote(name)} of compressed-tensors, which specjax does not read (only "
            f"{', '.join(FORMATS)})"
        )


def _settings_of(group: ConfigFields) -> _Scheme:
    if group.has("format"):
        _check_format(group, group.where)
    if not group.has("weights"):
        raise UsageError(f"{group.where} has {group.prefix}weights without a value; specjax reads quantised weights")
    weights = group.subfields("weights")
    size = weights.size("group_size", 0, minimum=-1)
    default = "channel" if size < 0 else "group" if size else "tensor"
    bits, strategy = weights.size("num_bits", 8, maximum=8), weights.text("strategy", default)
    if strategy not in STRATEGIES:
        raise UsageError(
            f"{group.where} has {weights.prefix}strategy {quote(strategy)}; supported are {', '.join(STRATEGIES)}"
        )
    if strategy == "group" and size < 1:
        raise UsageError(f"{group.where} has {weights.prefix}group_size {size}, which must be a positive number")
    block = weights.array("block_structure", int, 2) if strategy == "block" else [1, 1]
    if len(block) != 2 or min(block) < 1:
        raise UsageError(f"{group.where} lacks a {weights.prefix}block_structure of two positive numbers")
    if group.value("output_activations"):
        raise UsageError(f"{group.where} rounds outputs ({group.prefix}output_activations), which specjax does not")
    inputs = _inputs(group.subfields("input_activations"), strategy)
    return _Scheme(bits, strategy, size if strategy == "group" else 0, (block[0], block[1]), inputs)


def _inputs(activations: ConfigFields, strategy: str) -> str | None:
    """Return the dtype to which activations are rounded.

    Raises: UsageError for another rounding than symmetric and dynamic 8 bits.
    """
    if not activations.values:
        return None
    dynamic: Any = activations.value("dynamic")
    if dynamic is not True:
        raise UsageError(
            f"{activations.where} has static activation scales ({activations.prefix}dynamic {quote(dynamic)}), which "
            "specjax does not read; quantise the model with dynamic ones"
        )
    kind = activations.text("type", "int"), activations.size("num_bits", 8), activations.flag("symmetric", True)
    names = {("int", 8, True): "int8", ("float", 8, True): FLOAT8}
    rounding = activations.text("strategy", "token")
    expected = "group" if strategy == "block" else "token"
    if kind not in names or rounding != expected:
        raise UsageError(
            f"{activations.where} rounds activations to {kind[0]}{kind[1]} per {rounding}"
            f"{'' if kind[2] else ' with zero points'}; supported are symmetric int8 and float8 per {expected}"
        )
    return names[kind]


def _read(settings: _Scheme, matrix: StoredMatrix) -> StoredArray:
    if "input_scale" in matrix.parts:
        raise matrix.error("has static activation scales (input_scale), which specjax does not read")
    if "weight_packed" in matrix.parts and matrix.parts["weight_packed"].kind == "U8":
        return mxfp4.read_codes(matrix, "weight_packed", "weight_scale")
    if "weight_packed" in matrix.parts:
        return _packed(settings, matrix)
    shape = matrix.matrix_shape("weight", ("I8", *FLOAT8_VALUES))
    tensor = matrix.parts["weight"]
    scales = _scales(settings, matrix, shape)
    if tensor.kind in FLOAT8_VALUES:
        return float8_matrix(matrix, tensor, scales, settings.inputs)
    return _whole_numbers(settings, matrix, scales, lambda start, stop: read_stored(tensor, start, stop))


def _packed(settings: _Scheme, matrix: StoredMatrix) -> StoredArray:
    bits = settings.bits
    outputs, words = matrix.matrix_shape("weight_packed", ("I32",))
    shape = tuple(read_stored(matrix.part("weight_shape", ("I64", "I32"), [(2,)])).tolist())
    if shape[0] != outputs or num_words(bits, shape[1]) != words:
        raise matrix.error(
            f"has weight_packed of shape {[outputs, words]}, which are not the words of {quote(list(shape))} numbers "
            f"of {bits} bits; files with mixed bits are not read"
        )
    tensor = matrix.parts["weight_packed"]
    values = lambda start, stop: signed(unpack(read_stored(tensor, start, stop), bits, shape[1]), bits)
    return _whole_numbers(settings, matrix, _scales(settings, matrix, shape), values)


def _scales(settings: _Scheme, matrix: StoredMatrix, shape: tuple[int, int]) -> BlockScales:
    if settings.strategy == "group":
        matrix.num_groups(shape[1], settings.group)
    blocks = {"tensor": shape, "channel": (1, shape[1]), "group": (1, settings.group), "block": settings.block}
    return block_scales(matrix, "weight_scale", shape, blocks[settings.strategy])


def _whole_numbers(settings: _Scheme, matrix: StoredMatrix, scales: BlockScales, values: Numbers) -> StoredArray:
    """Return the matrix of whole numbers int8 that `values(start, stop)` reads."""
    zeros = _zero_points(settings.bits, matrix, scales)

    def rows(start: int, stop: int) -> QuantizedArray:
        scale = scales.rows(start, stop)
        return QuantizedArray(values(start, stop), scale, None if zeros is None else scale * zeros(start, stop))

    groups = scales.shape[1] // scales.group
    form = integer_form(settings.bits, scales.shape, groups, has_offsets=zeros is not None, inputs=settings.inputs)
    group = matrix.group_of_inputs("weight_g_idx", scales.shape[1], groups)
    return matrix.grouped(scales.shape, form, rows, group)


def _zero_points(bits: int, matrix: StoredMatrix, scales: BlockScales) -> Numbers | None:
    """Return the function that reads zero points float32[n, G] of some outputs; None if there are none, or zeros."""
    part = matrix.parts.get("weight_zero_point")
    if part is None:
        return None
    grid = scales.tensor.shape
    if part.kind == "I32":
        tensor = matrix.part("weight_zero_point", ("I32",), [(num_words(bits, grid[0]), grid[1])])
        read = functools.partial(_packed_zero_points, tensor, bits)
        return read if np.any(read(0, grid[0])) else None
    zeros = block_scales(matrix, "weight_zero_point", scales.shape, scales.block, ("I8",))
    return zeros.rows if np.any(read_stored(zeros.tensor)) else None


def _packed_zero_points(tensor: TensorLocation, bits: int, start: int, stop: int) -> np.ndarray:
    first_word, end_word, first = words_of(bits, start, stop)
    numbers = unpack(read_stored(tensor, first_word, end_word).T, bits, stop - first)[:, start - first :]
    return signed(np.ascontiguousarray(numbers.T), bits).astype(np.float32)
