"""The method fp8 of DeepSeek and Qwen: float8 values with scales of tiles of 128 x 128 numbers, or of the matrix.

weight float8[O, I], weight_scale_inv [O / 128, I / 128]. The scale multiplies, despite its name.
"""

from __future__ import annotations

import functools
import math

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.quantized.block_scales import block_scales
from specjax.models.loading.quantized.float8 import float8_matrix
from specjax.models.loading.quantized.stored_matrix import FLOAT8_VALUES, Reader, StoredMatrix
from specjax.models.loading.tensors.tensors import StoredArray
from specjax.numerics.quantized_array import FLOAT8

PARTS = "weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale"


def reader(fields: ConfigFields) -> Reader:
    """Return the reader of matrices. Raises: UsageError for static activation scales or another shape of blocks."""
    scheme, block = fields.text("activation_scheme", "dynamic"), fields.array("weight_block_size", int)
    if scheme != "dynamic":
        raise UsageError(
            f"{fields.where} has the activation_scheme {quote(scheme)}; specjax reads no static activation scales, so "
            "quantise the model with dynamic ones"
        )
    if block and (len(block) != 2 or min(block) < 1):
        raise UsageError(f"{fields.where} has weight_block_size {quote(block)}, which must be two positive numbers")
    return functools.partial(_read, tuple(block))


def _read(block: tuple[int, ...], matrix: StoredMatrix) -> StoredArray:
    static = next((part for part in ("input_scale", "activation_scale") if part in matrix.parts), None)
    if static is not None:
        raise matrix.error(f"has static activation scales ({static}), which specjax does not read")
    shape = matrix.matrix_shape("weight", FLOAT8_VALUES)
    part = next((part for part in ("weight_scale_inv", "weight_scale") if part in matrix.parts), None)
    if part is None:
        raise matrix.error("is float8 without its scale (weight_scale_inv or weight_scale); download it again")
    if not block or part == "weight_scale":
        size = math.prod(matrix.parts[part].shape)
        block = shape if size == 1 else (1, shape[1])
    scales = block_scales(matrix, part, shape, (block[0], block[1]))
    return float8_matrix(matrix, matrix.parts["weight"], scales, FLOAT8)
