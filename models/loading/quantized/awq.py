"""AWQ in the version "gemm": words of eight outputs in an interleaved order, with zero points.

qweight int32[I, O / 8], qzeros int32[G, O / 8], scales [G, O]. The numbers of a word, lowest bits first, are those of
the outputs 0, 2, 4, 6, 1, 3, 5, 7. weight[o, i] = scales[g, o] * (q[i, o] - z[g, o]).
"""

from __future__ import annotations

import functools

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.quantized.packing import signed, unpack
from specjax.models.loading.quantized.stored_matrix import (
    FLOATS,
    Reader,
    StoredMatrix,
    as_scales,
    group_size,
    integer_form,
)
from specjax.models.loading.tensors.tensors import StoredArray, TensorLocation, read_columns
from specjax.numerics.quantized_array import QuantizedArray

PARTS = "qweight", "qzeros", "scales"
BITS, PER_WORD = 4, 8
PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of the outputs in a word


def reader(fields: ConfigFields) -> Reader:
    """Return the reader of matrices. Raises: UsageError for another layout or number of bits."""
    version, backend = fields.text("version", "gemm").lower(), fields.text("backend", "autoawq")
    if version != "gemm" or backend == "llm-awq":
        name = f"version {quote(version)}" if version != "gemm" else f"backend {quote(backend)}"
        raise UsageError(f"{fields.where} has AWQ in the {name}, which has another layout; supported is gemm")
    bits = fields.size("bits" if fields.has("bits") else "w_bit", BITS)
    if bits != BITS:
        raise UsageError(f"{fields.where} has AWQ of {bits} bits; supported are 4")
    group = group_size(fields, "group_size" if fields.has("group_size") else "q_group_size", 128)
    if not fields.flag("zero_point", True):
        raise UsageError(f"{fields.where} has AWQ without zero points, which specjax does not read")
    return functools.partial(_read, group)


def _read(group: int, matrix: StoredMatrix) -> StoredArray:
    inputs, words = matrix.matrix_shape("qweight", ("I32",))
    shape = words * PER_WORD, inputs
    groups = matrix.num_groups(inputs, group)
    scales = matrix.scales("scales", [(groups, shape[0])], FLOATS)
    zeros = matrix.part("qzeros", ("I32",), [(groups, words)])

    def rows(start: int, stop: int) -> QuantizedArray:
        scale = as_scales(read_columns(scales, start, stop).T)
        zero = _outputs(zeros, start, stop).astype(np.float32)
        return QuantizedArray(_outputs(matrix.parts["qweight"], start, stop), scale, scale * zero)

    return matrix.grouped(shape, integer_form(BITS, shape, groups, has_offsets=True), rows)


def _outputs(tensor: TensorLocation, start: int, stop: int) -> np.ndarray:
    """Read the numbers of the outputs `start:stop`, less half of their range. Return int8[stop - start, n]."""
    first = start // PER_WORD
    words = read_columns(tensor, first, -(-stop // PER_WORD))
    numbers = unpack(words, BITS, words.shape[1] * PER_WORD).reshape(*words.shape, PER_WORD)[..., PLACES]
    place = start - first * PER_WORD
    return np.ascontiguousarray(signed(numbers.reshape(len(words), -1)[:, place : place + stop - start], BITS).T)
