"""Tensors of a file that describe one quantised matrix, and the arrays that every format makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.tensors.tensors import LazyTensor, QuantizedTensor, StoredArray, TensorLocation, read_stored
from specjax.numerics.quantized_array import QuantizedArray, WeightFormat

FLOATS = "F32", "F16", "BF16"
FLOAT8_VALUES = "F8_E4M3", "F8_E5M2"
SCALES = (*FLOATS, "F8_E8M0")
CHUNK = 1 << 20  # numbers that are checked at a time

Rows = Callable[[int, int], QuantizedArray]


class StoredMatrix(NamedTuple):
    """The tensors of one quantised matrix, by the last part of their names.

    The keys of `parts` are names such as "qweight"; `name` is that of the module.
    """

    name: str
    parts: Mapping[str, TensorLocation]

    def error(self, problem: str) -> UsageError:
        """Return an error about this matrix. `problem` is the rest of a sentence that begins with its name."""
        file = next(iter(self.parts.values())).file
        return UsageError(f"{file}: the quantised matrix {quote(self.name)} {problem}")

    def part(
        self, part: str, kinds: Collection[str], shapes: Collection[tuple[int, ...]] | None = None
    ) -> TensorLocation:
        """Return the tensor with this name.

        Raises: UsageError if it is absent, or has none of these storage formats or shapes.
        """
        if part not in self.parts:
            raise self.error(f"lacks the tensor {part}; download it again")
        tensor = self.parts[part]
        if tensor.kind not in kinds:
            raise self.error(f"has {part} stored as {quote(tensor.kind)}, which must be {' or '.join(kinds)}")
        if shapes is not None and tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(f"has {part} of shape {quote(list(tensor.shape))}, which must be {expected}")
        return tensor

    def scales(self, part: str, shapes: Collection[tuple[int, ...]], kinds: Collection[str] = SCALES) -> TensorLocation:
        """Return the tensor of scales with this name. Raises: UsageError if `part` does, or for NaN or infinity."""
        tensor = self.part(part, kinds, shapes)
        rows = max(1, CHUNK // math.prod(tensor.shape[1:]))
        size = math.prod(tensor.shape[:1])
        for start in range(0, size, rows):
            if not np.isfinite(read_stored(tensor, start, min(start + rows, size)).astype(np.float32)).all():
                raise self.error(f"has NaN or infinity in {part}; download it again or quantise the model again")
        return tensor

    def matrix_shape(self, part: str, kinds: Collection[str]) -> tuple[int, int]:
        """Return the shape of a part with two axes. Raises: UsageError for other parts."""
        shape = self.part(part, kinds).shape
        if len(shape) != 2:
            raise self.error(f"has {part} of shape {quote(list(shape))}, which must have two axes")
        return shape[0], shape[1]

    def num_groups(self, inputs: int, group: int) -> int:
        """Return the number of groups of `inputs` inputs; -1 stands for one group of all.

        Raises: UsageError if the groups do not divide the inputs.
        """
        if group == -1:
            return 1
        if inputs % group:
            raise self.error(f"has groups of {group} inputs, which do not divide its {inputs} inputs")
        return inputs // group

    def group_of_inputs(self, part: str, inputs: int, groups: int) -> np.ndarray | None:
        """Return the group int[inputs] of each input from a part of the file.

        None stands for equal groups in order.

        Raises: UsageError for another shape, or a group that does not exist.
        """
        if part not in self.parts:
            return None
        group = read_stored(self.part(part, ("I32", "I64"), [(inputs,)]))
        if (group == -1).all():  # files of compressed-tensors that were made without an order
            return None
        invalid = group[(group < 0) | (group >= groups)]
        if invalid.size:
            raise self.error(f"has {invalid[0]} in {part}, which must be a group from 0 to {groups - 1}")
        return None if np.array_equal(group, np.arange(inputs) // (inputs // groups)) else group

    def grouped(
        self, shape: tuple[int, ...], form: WeightFormat, rows: Rows, group: np.ndarray | None = None
    ) -> StoredArray:
        """Return the matrix [O, I] with these rows.

        group: the group of each input if they are in another order. Such a matrix is expanded when it is read.
        """
        file = next(iter(self.parts.values())).file
        if group is None:
            return QuantizedTensor(file, shape, form, rows)

        def expand(start: int, stop: int) -> np.ndarray:
            piece = rows(start, stop)
            weights = piece.values.astype(np.float32) * piece.scales[:, group]
            return weights if piece.offsets is None else weights - piece.offsets[:, group]

        return LazyTensor(file, shape, expand, "groups of inputs that are not in order (desc_act or actorder)")


Reader = Callable[[StoredMatrix], StoredArray]
"""Function from the tensors of a file to the matrix that they describe."""


def group_size(fields: ConfigFields, name: str, default: int) -> int:
    """Return the number of inputs per group; -1 stands for all inputs. Raises: UsageError for another value."""
    size = fields.size(name, default, minimum=-1)
    if size == 0:
        raise UsageError(f"{fields.where} has {fields.prefix}{name} 0, which must be -1 or a positive number")
    return size


def integer_form(
    bits: int, shape: tuple[int, int], groups: int, *, has_offsets: bool, inputs: str | None = None
) -> WeightFormat:
    """Return the `WeightFormat` of a matrix of whole numbers with `groups` groups per row."""
    group = None if groups == 1 else shape[1] // groups
    return WeightFormat(bits, "int4" if bits <= 4 else "int8", group, has_offsets, inputs)


def as_scales(stored: np.ndarray) -> np.ndarray:
    """Return scales as float32."""
    return np.ascontiguousarray(stored.astype(jnp.float32))
