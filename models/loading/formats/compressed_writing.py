"""Writer of quantised matrices in the format compressed-tensors.

int-quantized and float-quantized store weight int8 or float8[O, I]. pack-quantized stores weight_packed
int32[O, words], whose words contain q + 2^(bits - 1) of consecutive inputs, lowest bits first. All have weight_scale
float32[O, G], so matrices are read back to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.numerics.quantized_array import FLOAT8, QuantizedArray, WeightFormat
from specjax.types import Array

INT, FLOAT, PACKED = "int-quantized", "float-quantized", "pack-quantized"
WORD_BYTES = 4


class FolderFormat(NamedTuple):
    """The format of all quantised matrices of a folder."""

    name: str  # INT, FLOAT or PACKED
    bits: int
    group: int | None  # inputs per scale; None: all of a row
    inputs: str | None  # see `WeightFormat.inputs`


def common_format(forms: Collection[WeightFormat], inputs: Collection[int], name: str) -> FolderFormat:
    """Return the one format that expresses all matrices without loss.

    Whole numbers of up to four bits are packed in four, others in eight. A scale is repeated if other matrices have
    smaller groups.

    Args:
      inputs: numbers of inputs of the matrices. name: that of the model, for errors.

    Raises: UsageError for offsets, which are no products of scales and whole numbers, and for a mixture of float8 and
      whole numbers or of products with and without rounded activations.
    """
    if any(form.has_offsets for form in forms):
        raise UsageError(
            f"{name} has matrices with an offset per group, as Q4_K of GGUF has, which compressed-tensors cannot "
            "store; load it with keep_quantized=False, and give quantize to round it to a scheme"
        )
    kinds = {(form.values == FLOAT8, form.inputs) for form in forms}
    if len(kinds) > 1:
        raise UsageError(
            f"{name} has matrices whose kinds of numbers or products differ, which one folder of compressed-tensors "
            "cannot store; load it with one scheme of quantize"
        )
    [(is_float, rounding)] = kinds
    groups = [form.group for form in forms]
    group = None if all(size is None for size in groups) else math.gcd(*(size or 0 for size in groups), *inputs)
    bits = 8 if is_float or any(form.bits > 4 for form in forms) else 4
    if is_float:
        return FolderFormat(FLOAT, bits, group, rounding)
    is_plain = rounding is not None and bits == 8 and group is None
    return FolderFormat(INT if is_plain else PACKED, bits, group, rounding)


def quantization_config(form: FolderFormat, has_embedding: bool, float_modules: Collection[str]) -> dict[str, Any]:
    """Return the field quantization_config of config.json.

    has_embedding: the embedding is quantised too. float_modules: modules with a matrix that is not quantised.
    """
    activations = None if form.inputs is None else _numbers(form.inputs == FLOAT8, 8, "token") | {"dynamic": True}
    strategy = "channel" if form.group is None else "group"
    return {
        "quant_method": "compressed-tensors",
        "format": form.name,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear", *["Embedding"] * has_embedding],
                "weights": _numbers(form.name == FLOAT, form.bits, strategy) | {"group_size": form.group},
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": sorted(float_modules),
        "kv_cache_scheme": None,
    }


def _numbers(is_float: bool, bits: int, strategy: str) -> dict[str, Any]:
    kind = "float" if is_float else "int"
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}


def named_arrays(module: str, matrix: QuantizedArray, form: FolderFormat) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix by their names in a file."""
    values, scales = np.asarray(matrix.values), np.asarray(matrix.scales, np.float32)
    if form.group is not None:
        scales = np.repeat(scales, values.shape[1] // form.group // scales.shape[1], 1)
    scale = {f"{module}.weight_scale": scales}
    if form.name != PACKED:
        return {f"{module}.weight": values, **scale}
    shape = np.array(values.shape, np.int64)
    return {f"{module}.weight_packed": pack(values, form.bits), **scale, f"{module}.weight_shape": shape}


def pack(values: Array | np.ndarray, bits: int) -> np.ndarray:
    """Pack whole numbers [O, I] of 4 or 8 bits into int32[O, words]."""
    codes = (np.asarray(values).astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (WORD_BYTES * 8 // bits))))
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(codes).view("<i4")


def compress(
    tensors: Mapping[str, Any], forms: Mapping[str, WeightFormat], embedding: str, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a file, and the fields of its config.json, for a model with quantised matrices.

    Args:
      tensors: arrays by their names. forms: the formats of those that are quantised.
      embedding: the name of the embedding. name: that of the model, for errors.

    Raises: UsageError for matrices that the format cannot express.
    """
    if not forms:
        return dict(tensors), {}
    form = common_format(forms.values(), [tensors[key].shape[-1] for key in forms], name)
    result: dict[str, Any] = {}
    for key, tensor in tensors.items():
        result |= named_arrays(module_of(key), tensor, form) if key in forms else {key: tensor}
    float_modules = [module_of(key) for key, tensor in tensors.items() if key not in forms and len(tensor.shape) == 2]
    return result, {"quantization_config": quantization_config(form, embedding in forms, float_modules)}


def module_of(name: str) -> str:
    """Return the module of a tensor name, which is the name without its last part."""
    return name.rpartition(".")[0]
