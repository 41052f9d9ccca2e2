"""MXFP4: floats of four bits, 32 of which share a power of two.

blocks uint8[O, I / 32, 16] or [O, I / 2]: the lower four bits of a byte are the earlier number. scales
uint8[O, I / 32]: exponents with a bias of 127. Those of experts have their axis first. Twice the values are whole
numbers, so the matrix is kept as int8 with half the scale.
"""

from __future__ import annotations

import math

import numpy as np

from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.quantized.stored_matrix import Reader, StoredMatrix
from specjax.models.loading.tensors.tensors import StoredArray, read_stored
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat

PARTS = "weight_blocks", "weight_scales", "_blocks", "_scales"
"""The last parts belong to names without `.weight`, as `gate_up_proj_blocks`."""
GROUP, BIAS, NAN = 32, 127, 255
TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each code."""


def reader(fields: ConfigFields) -> Reader:
    """Return the reader of matrices."""
    return _read


def _read(matrix: StoredMatrix) -> StoredArray:
    prefix = "weight" if any(part.startswith("weight") for part in matrix.parts) else ""
    return read_codes(matrix, f"{prefix}_blocks", f"{prefix}_scales")


def read_codes(matrix: StoredMatrix, blocks: str, scales: str) -> StoredArray:
    """Return the matrix of these parts, or those of experts [E, O, I].

    Raises: UsageError for other shapes or an exponent that is NaN.
    """
    tensor = matrix.part(blocks, ("U8",))
    experts = tensor.shape[:1] if len(tensor.shape) == 4 else ()
    outputs, *columns = tensor.shape[len(experts) :] or (0,)
    inputs = 2 * math.prod(columns)
    groups = matrix.num_groups(inputs, GROUP)
    shape = *experts, outputs
    tensor = matrix.part(blocks, ("U8",), [(*shape, inputs // 2), (*shape, groups, GROUP // 2)])
    exponents = matrix.part(scales, ("U8", "F8_E8M0"), [(*shape, groups)])
    rows_in_file = math.prod(shape)  # those of all experts, one after another
    tensor = tensor._replace(shape=(rows_in_file, inputs // 2))
    exponents = exponents._replace(kind="U8", shape=(rows_in_file, groups))
    if (read_stored(exponents) == NAN).any():
        raise matrix.error(f"has NaN in {scales}; download it again or quantise the model again")

    def rows(start: int, stop: int) -> QuantizedArray:
        pairs = read_stored(tensor, start, stop).reshape(stop - start, -1)
        values = TWICE[np.stack([pairs & 15, pairs >> 4], -1)].reshape(stop - start, inputs)
        exponent = read_stored(exponents, start, stop).astype(np.int32) - BIAS - 1
        return QuantizedArray(values, np.ldexp(np.float32(1), exponent))

    # Five bits: the whole numbers are from -12 to 12.
    return matrix.grouped((*shape, inputs), WeightFormat(5, "int8", None if groups == 1 else GROUP), rows)
