"""GPTQ: words of packed inputs, with a zero point per group and output, and possibly inputs in another order.

qweight int32[I * bits / 32, O] is packed along the inputs, qzeros int32[G, O * bits / 32] along the outputs, scales
[G, O], g_idx int32[I]. weight[o, i] = scales[g, o] * (q[i, o] - z[g, o]) with g = g_idx[i]. The format "gptq" stores
z - 1, and "gptq_v2" stores z.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.quantized.packing import WORD, num_words, signed, unpack, words_of
from specjax.models.loading.quantized.stored_matrix import (
    FLOATS,
    Reader,
    StoredMatrix,
    as_scales,
    group_size,
    integer_form,
)
from specjax.models.loading.tensors.tensors import StoredArray, TensorLocation, read_columns, read_stored
from specjax.numerics.quantized_array import QuantizedArray

PARTS = "qweight", "qzeros", "scales", "g_idx"
BITS = 2, 3, 4, 8
FORMATS = {"gptq": 1, "gptq_v2": 0}  # added to a stored zero point


class _GptqSettings(NamedTuple):
    bits: int
    group: int  # -1: all inputs
    symmetric: bool
    shift: int  # added to stored zero points


def reader(fields: ConfigFields) -> Reader:
    """Return the reader of matrices. Raises: UsageError for another layout or number of bits."""
    kind, bits = fields.text("checkpoint_format", "gptq"), fields.size("bits")
    if kind not in FORMATS:
        raise UsageError(f"{fields.where} has checkpoint_format {quote(kind)} of GPTQ; supported are gptq and gptq_v2")
    if fields.flag("is_marlin_format"):
        raise UsageError(f"{fields.where} has the Marlin layout of GPTQ; save the model in the format gptq")
    if bits not in BITS:
        raise UsageError(f"{fields.where} has GPTQ of {bits} bits; supported are 2, 3, 4 and 8")
    rules = fields.subfields("dynamic")
    if not all(name.removeprefix(rules.prefix).startswith("-:") for name in rules.values):  # these leave modules out
        raise UsageError(f"{fields.where} has modules with bits of their own (dynamic), which specjax does not read")
    group = group_size(fields, "group_size", -1)
    return functools.partial(_read, _GptqSettings(bits, group, fields.flag("sym", True), FORMATS[kind]))


def _read(settings: _GptqSettings, matrix: StoredMatrix) -> StoredArray:
    bits = settings.bits
    packed_rows, outputs = matrix.matrix_shape("qweight", ("I32",))
    inputs = packed_rows * WORD // bits
    order = matrix.parts.get("g_idx")
    if packed_rows * WORD % bits or (order is not None and order.shape != (inputs,)):
        raise matrix.error(
            f"has {packed_rows} words per output, which are {inputs} inputs of {bits} bits, and not those of its "
            "g_idx; files with mixed bits are not read"
        )
    groups = matrix.num_groups(inputs, settings.group)
    scales = matrix.scales("scales", [(groups, outputs)], FLOATS)
    zeros = matrix.part("qzeros", ("I32",), [(groups, num_words(bits, outputs))])
    shift, has_offsets = _zero_points(settings, zeros, outputs)

    def rows(start: int, stop: int) -> QuantizedArray:
        words = read_columns(matrix.parts["qweight"], start, stop)
        values = signed(unpack(words.T, bits, inputs), bits)
        scale = as_scales(read_columns(scales, start, stop).T)
        if not has_offsets:
            return QuantizedArray(values, scale)
        first_word, end_word, first = words_of(bits, start, stop)
        stored = unpack(read_columns(zeros, first_word, end_word), bits, stop - first)[:, start - first :]
        zero = stored.T.astype(np.float32) + np.float32(shift - 2 ** (bits - 1))
        return QuantizedArray(values, scale, scale * zero)

    shape = outputs, inputs
    form = integer_form(bits, shape, groups, has_offsets=has_offsets)
    return matrix.grouped(shape, form, rows, matrix.group_of_inputs("g_idx", inputs, groups))


def _zero_points(settings: _GptqSettings, zeros: TensorLocation, outputs: int) -> tuple[int, bool]:
    """Return the number that is added to stored zero points, and False if all of them are the middle of the range.

    Some symmetric files are named gptq and store z itself. Their only value shows it.
    """
    middle = 2 ** (settings.bits - 1)
    stored = unpack(read_stored(zeros), settings.bits, outputs)
    low, high = int(stored.min()), int(stored.max())
    if settings.symmetric and low == high and low in (middle - 1, middle):
        return middle - low, False
    return settings.shift, not low == high == middle - settings.shift
