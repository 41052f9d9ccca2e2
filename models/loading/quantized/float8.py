"""Matrices of float8 values with scales of blocks."""

from __future__ import annotations

from specjax.models.loading.quantized.block_scales import BlockScales
from specjax.models.loading.quantized.stored_matrix import StoredMatrix
from specjax.models.loading.tensors.tensors import CODES, StoredArray, TensorLocation, read_stored
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat


def float8_matrix(matrix: StoredMatrix, tensor: TensorLocation, scales: BlockScales, inputs: str | None) -> StoredArray:
    """Return the matrix values * scale. `inputs`: see `WeightFormat.inputs`."""
    rows = lambda start, stop: QuantizedArray(read_stored(tensor, start, stop), scales.rows(start, stop))
    group = None if scales.group == scales.shape[1] else scales.group
    return matrix.grouped(scales.shape, WeightFormat(8, CODES[tensor.kind], group, inputs=inputs), rows)
