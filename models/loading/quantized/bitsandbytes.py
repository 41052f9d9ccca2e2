"""bitsandbytes: codes of four bits for the values of a table (nf4, fp4), or int8 with a scale per output.

nf4: weight uint8[N / 2, 1] are the codes of all numbers in the order of rows, the higher four bits first. weight.absmax
has a scale per block of 64. Quantised twice, these scales are codes of another table with scales of their own.
int8: weight int8[O, I], SCB float32[O]. weight = q * SCB / 127.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from specjax.files.untrusted import parse_json, quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.quantized.stored_matrix import Reader, StoredMatrix, as_scales, integer_form
from specjax.models.loading.tensors.tensors import DTYPES, LazyTensor, StoredArray, TensorLocation, read_stored
from specjax.numerics.quantized_array import QuantizedArray

STATES = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
PARTS = (
    "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES, "SCB",
    "weight_format",
)  # fmt: skip
MAX_STATE = 1 << 12  # bytes of a description
LARGEST = 127.0

Numbers = Callable[[int, int], np.ndarray]


def reader(fields: ConfigFields) -> Reader:
    """Return the reader of matrices."""
    return _read


def _read(matrix: StoredMatrix) -> StoredArray:
    state = next((name for name in STATES if name in matrix.parts), None)
    if state is not None:
        return _codes(matrix, _state(matrix, state), state.rpartition("_")[2])
    if "SCB" not in matrix.parts and matrix.parts["weight"].kind != "I8":
        raise matrix.error("has codes without a quant_state; download it again")
    shape = matrix.matrix_shape("weight", ("I8",))
    scales = matrix.scales("SCB", [shape[:1], (shape[0], 1)])._replace(shape=(shape[0], 1))
    layout = read_stored(matrix.part("weight_format", ("U8",), [(), (1,)])) if "weight_format" in matrix.parts else 0
    if np.any(layout):
        raise matrix.error("has int8 numbers in the order of a GPU (weight_format); save the model again")
    values = matrix.parts["weight"]

    def rows(start: int, stop: int) -> QuantizedArray:
        return QuantizedArray(read_stored(values, start, stop), as_scales(read_stored(scales, start, stop)) / LARGEST)

    return matrix.grouped(shape, integer_form(8, shape, 1, has_offsets=False), rows)


def _state(matrix: StoredMatrix, name: str) -> ConfigFields:
    tensor = matrix.part(name, ("U8",))
    if len(tensor.shape) != 1 or tensor.shape[0] > MAX_STATE:
        raise matrix.error(f"has {name} of shape {quote(list(tensor.shape))}, which must be a short text")
    where = f"{tensor.file}: {matrix.name}.{name}"
    values = parse_json(read_stored(tensor).tobytes(), where)
    if not isinstance(values, dict):
        raise matrix.error(f"has {name} that is not a JSON object; download it again")
    return ConfigFields(values, where)


def _codes(matrix: StoredMatrix, state: ConfigFields, kind: str) -> LazyTensor:
    """Return the matrix of codes of four bits. A table of values has no form that products can use."""
    outputs, inputs = shape = _shape(matrix, state)
    size, block = outputs * inputs, state.size("blocksize", 64)
    packed = matrix.part("weight", DTYPES)  # the dtype of the storage can be any
    if packed.num_bytes != -(-size // 2):
        raise matrix.error(f"has {packed.num_bytes} bytes of codes, which must be {-(-size // 2)} for {list(shape)}")
    packed = TensorLocation(packed.file, packed.offset, (packed.num_bytes,), "U8")
    table = as_scales(read_stored(matrix.scales("weight.quant_map", [(16,)])))
    scales = _scales(matrix, state, -(-size // block))

    def rows(start: int, stop: int) -> np.ndarray:
        first, end = start * inputs, stop * inputs
        pairs = read_stored(packed, first // 2, -(-end // 2))
        codes = np.stack([pairs >> 4, pairs & 15], -1).reshape(-1)[first % 2 :][: end - first]
        place = np.arange(first, end) // block
        weights = table[codes] * scales(int(place[0]), int(place[-1]) + 1)[place - place[0]]
        return weights.reshape(-1, inputs)

    return LazyTensor(packed.file, shape, rows, f"codes of {kind}")


def _shape(matrix: StoredMatrix, state: ConfigFields) -> tuple[int, int]:
    shape = state.array("shape", int, 2)
    if len(shape) != 2 or min(shape) < 1:
        raise matrix.error(f"has the shape {quote(shape)} in its quant_state, which must be two positive numbers")
    return shape[0], shape[1]


def _scales(matrix: StoredMatrix, state: ConfigFields, count: int) -> Numbers:
    """Return the function that reads the scales float32[stop - start] of some blocks."""
    if "weight.nested_absmax" not in matrix.parts:
        plain = matrix.scales("weight.absmax", [(count,), (count, 1)])._replace(shape=(count,))
        return lambda start, stop: as_scales(read_stored(plain, start, stop))
    codes, block = matrix.part("weight.absmax", ("U8",), [(count,), (count, 1)])._replace(shape=(count,)), 256
    block = state.size("nested_blocksize", block)
    table = as_scales(read_stored(matrix.scales("weight.nested_quant_map", [(256,)])))
    largest = as_scales(read_stored(matrix.scales("weight.nested_absmax", [(math.ceil(count / block),)])))
    offset = np.float32(state.number("nested_offset", minimum=-1e30))
    return lambda start, stop: (
        table[read_stored(codes, start, stop)] * largest[np.arange(start, stop) // block] + offset
    )
