"""GGML's blocks of quantised weights, unpacked to whole numbers with a scale, and perhaps an offset, per group.

The layouts are those of ggml-common.h of llama.cpp. A block starts or ends with scales in float16. K-quants have blocks
of 256 weights in groups, whose scales are small whole numbers times that of the block. The expanded weights equal those
of `gguf.quants.dequantize` to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.tensors.tensors import QuantizedTensor, TensorLocation, block_size, read_stored_bytes
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat

BITS = np.arange(8, dtype=np.uint8)
FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of MXFP4's four bits, which are whole numbers; the scales are halved."""

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""Values of the four bits of IQ4_NL and IQ4_XS."""

Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Values int8[blocks, weights], and scales and offsets float32[blocks, groups]."""


class BlockLayout(NamedTuple):
    """The format of a kind of blocks, and the function that unpacks blocks uint8[blocks, bytes]."""

    form: WeightFormat
    unpack: Callable[[np.ndarray], Unpacked]


def quantized_tensor(name: str, tensor: TensorLocation) -> TensorLocation | QuantizedTensor:
    """Return a stored matrix, or those of experts [E, O, I], in its own format.

    Other tensors, and kinds without a layout here, stay as they are.
    """
    if len(tensor.shape) not in (2, 3) or tensor.kind not in LAYOUTS:
        return tensor
    layout, by_row = LAYOUTS[tensor.kind], tensor._replace(shape=(math.prod(tensor.shape[:-1]), tensor.shape[-1]))

    def rows(start: int, stop: int) -> QuantizedArray:
        raw = read_stored_bytes(by_row, start, stop)
        with np.errstate(over="ignore", invalid="ignore"):
            values, scales, offsets = layout.unpack(raw.reshape(-1, block_size(tensor.kind)[1]))
        if not (np.isfinite(scales).all() and (offsets is None or np.isfinite(offsets).all())):
            raise UsageError(f"{tensor.file} has a scale in {quote(name)} that is not finite; download it again")
        reshaped = lambda x: None if x is None else x.reshape(stop - start, -1)
        return QuantizedArray(reshaped(values), reshaped(scales), reshaped(offsets))

    return QuantizedTensor(tensor.file, tensor.shape, layout.form, rows)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 number at a byte of each block, as float32[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _fields(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Return the fields of `bits` bits of bytes uint8[blocks, n], lowest bits first, as int8[blocks, n * 8 // bits].

    The same bits of `run` bytes in a row are neighbours.
    """
    shifts = BITS[::bits].reshape(1, 1, -1, 1)
    fields = (data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(len(data), -1).view(np.int8)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Return the four-bit values of a block of 32 weights: the first half has the low bits of its bytes."""
    return _fields(data, 4, 16)


def _five_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return _nibbles(low) | _fields(high, 1, 1) << 4


def _q8_0(b: np.ndarray) -> Unpacked:
    return np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b, 0), None


def _q4_0(b: np.ndarray) -> Unpacked:
    return _nibbles(b[:, 2:]) - np.int8(8), _half(b, 0), None


def _q4_1(b: np.ndarray) -> Unpacked:
    return _nibbles(b[:, 4:]), _half(b, 0), -_half(b, 2)


def _q5_0(b: np.ndarray) -> Unpacked:
    return _five_bits(b[:, 6:], b[:, 2:6]) - np.int8(16), _half(b, 0), None


def _q5_1(b: np.ndarray) -> Unpacked:
    return _five_bits(b[:, 8:], b[:, 4:8]), _half(b, 0), -_half(b, 2)


def _q2_k(b: np.ndarray) -> Unpacked:
    scales = b[:, :16]
    return _fields(b[:, 16:80], 2, 32), _half(b, 80) * (scales & 15), _half(b, 82) * (scales >> 4)


def _q3_k(b: np.ndarray) -> Unpacked:
    """Unpack two bits per weight, and a third that subtracts 4 where it is not set."""
    scales = (_fields(b[:, 96:104], 4, 8) | _fields(b[:, 104:108], 2, 4) << 4) - np.int8(32)
    values = (_fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2) - np.int8(4)
    return values, _half(b, 108) * scales, None


def _six_bit_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and the offsets of the eight groups of blocks of Q4_K or Q5_K.

    Bytes 4 to 15 pack eight scales and eight offsets of six bits. The upper bits of the last four of each are the
    upper bits of the first four.
    """
    first, second, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], 1)
    offsets = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], 1)
    return _half(b, 0) * scales, _half(b, 2) * offsets


def _q4_k(b: np.ndarray) -> Unpacked:
    return _fields(b[:, 16:], 4, 32), *_six_bit_scales(b)


def _q5_k(b: np.ndarray) -> Unpacked:
    return _fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4, *_six_bit_scales(b)


def _q6_k(b: np.ndarray) -> Unpacked:
    values = (_fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4) - np.int8(32)
    return values, _half(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8), None


def _mxfp4(b: np.ndarray) -> Unpacked:
    return FP4_DOUBLED[_nibbles(b[:, 1:])], np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128), None


def _iq4_nl(b: np.ndarray) -> Unpacked:
    return IQ4_VALUES[_nibbles(b[:, 2:])], _half(b, 0), None


def _iq4_xs(b: np.ndarray) -> Unpacked:
    scales = (_fields(b[:, 4:8], 4, 1) | _fields(b[:, 2:4], 2, 1) << 4) - np.int8(32)
    return IQ4_VALUES[_nibbles(b[:, 8:])], _half(b, 0) * scales, None


def _layout(unpack: Callable[[np.ndarray], Unpacked], bits: int, values: str, group: int, offsets: bool = False):
    return BlockLayout(WeightFormat(bits, values, group, offsets), unpack)


LAYOUTS: Mapping[str, BlockLayout] = MappingProxyType(
    {
        "Q8_0": _layout(_q8_0, 8, "int8", 32),
        "Q4_0": _layout(_q4_0, 4, "int4", 32),
        "Q4_1": _layout(_q4_1, 4, "uint4", 32, True),
        "Q5_0": _layout(_q5_0, 5, "int8", 32),
        "Q5_1": _layout(_q5_1, 5, "int8", 32, True),
        "Q2_K": _layout(_q2_k, 2, "int4", 16, True),
        "Q3_K": _layout(_q3_k, 3, "int4", 16),
        "Q4_K": _layout(_q4_k, 4, "uint4", 32, True),
        "Q5_K": _layout(_q5_k, 5, "int8", 32, True),
        "Q6_K": _layout(_q6_k, 6, "int8", 16),
        "MXFP4": _layout(_mxfp4, 5, "int8", 32),  # five bits: its whole numbers are from -12 to 12
        "IQ4_NL": _layout(_iq4_nl, 8, "int8", 32),
        "IQ4_XS": _layout(_iq4_xs, 8, "int8", 32),
    }
)
"""Layouts of the block formats whose weights are whole numbers times a scale of their group, minus its offset."""
