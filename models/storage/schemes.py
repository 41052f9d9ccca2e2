"""Schemes that quantise the matrices of a model, and the format of each matrix in a config."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from specjax.catalog.schemes import check_scheme, with_scheme
from specjax.errors import UsageError
from specjax.numerics.quantized_array import FLOAT8, QuantizedArray, WeightFormat, quantize_rows
from specjax.types import PyTree

C = TypeVar("C", bound=Any)

INT4_GROUP, MIN_GROUP = 128, 16
"""Number of inputs that share a scale in the scheme int4-weights, and the smallest number in any format."""

EXPERTS = ("expert_gate", "expert_up", "expert_down")
"""Modules whose parameters have a leading axis of experts."""

FLOAT_MODULES = ("router", "shared_gate", "k_up", "v_up")
"""Modules that are not quantised: those of a mixture whose small errors change the choice of experts, and the matrices
of latent attention that are multiplied head by head."""

FLOAT_PARTS = ("tower", "connector")
"""Parts of a model that are not quantised: those that read the images of a prompt."""

HALF_BYTES = ("int4", "uint4")
"""Dtypes of values of which two take one byte."""

SCHEMES: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "int8": WeightFormat(inputs="int8"),
        "int8-weights": WeightFormat(),
        "int4-weights": WeightFormat(bits=4, values="int4", group=INT4_GROUP),
        "fp8": WeightFormat(values=FLOAT8),
    }
)
"""The formats of `load(quantize=...)`. All are symmetric; the scale is that of the largest magnitude of a group."""


def scheme_format(name: str, platform: str) -> WeightFormat:
    """Return the format of a scheme on "tpu", "gpu" or "cpu".

    Raises: UsageError for another name.
    """
    check_scheme(name)
    return stored_format(SCHEMES[name], platform)


def stored_format(form: WeightFormat, platform: str) -> WeightFormat:
    """Return the form in which a format is stored on a platform.

    XLA on CPU unpacks arrays of four bits element by element, so int8 arrays contain the values there.
    """
    return dataclasses.replace(form, values="int8") if platform == "cpu" and form.values in HALF_BYTES else form


def with_quantized(config: C, formats: tuple[tuple[str, WeightFormat | None], ...], platform: str) -> C:
    """Return a config with these formats, by patterns of module paths (`format_of`), on "tpu", "gpu" or "cpu".

    A kernel multiplies by weights with groups on a TPU. Layers are separate there, because a slice of stacked weights
    is copied if it is the operand of a kernel. For int4 weights of Llama 3 8B on a v6e chip, the copies take 18.8 ms of
    a step by the compiler's schedule.
    """
    has_kernel = platform == "tpu" and any(form is not None and form.group is not None for _, form in formats)
    return dataclasses.replace(config, quantized=formats, stacked=config.stacked and not has_kernel)


def quantized_config(config: C, scheme: str, platform: str) -> C:
    """Return the config of a model after quantisation by a scheme, with its name, on "tpu", "gpu" or "cpu".

    Raises: UsageError for an unknown scheme.
    """
    form = scheme_format(scheme, platform)
    return with_quantized(dataclasses.replace(config, name=with_scheme(config.name, scheme)), (("*", form),), platform)


def check_exact_products(config: Any) -> None:
    """Check that products with quantised matrices have the same bits in every pass: those of whole numbers.

    Raises: UsageError for a format that does not round activations to int8, or that has groups.
    """
    inexact = (form for _, form in config.quantized if form is not None and (form.inputs, form.group) != ("int8", None))
    form = next(inexact, None)
    if form is not None:
        raise UsageError(
            f"same_bits needs products of whole numbers, and weights of {form.bits} bits are multiplied by activations "
            'that are not rounded; use quantize="int8", or leave same_bits out'
        )


def format_of(config: Any, keys: tuple, shape: tuple[int, ...]) -> WeightFormat | None:
    """Return the format of the parameter at `keys` of a model, with the shape of one layer; None: it is not quantised.

    The rows of `config.quantized` are patterns of module paths, such as "layers.*.mlp.down", and formats. The first
    pattern that matches counts. Only matrices are quantised, and not those of FLOAT_MODULES and FLOAT_PARTS. A group
    that does not divide the inputs becomes their greatest common divisor. If that is below MIN_GROUP, the matrix is not
    quantised.
    """
    if (
        not config.quantized
        or keys[-1] != "weight"
        or len(shape) != 2 + is_of_experts(keys)
        or keys[-2] in FLOAT_MODULES
        or keys[0] in FLOAT_PARTS
    ):
        return None
    names = [key for key in keys[1:-1] if not (isinstance(key, int) and config.stacked)]
    in_stack = config.stacked and keys[0] == "layers"
    path = ".".join(map(str, [*keys[:1], *(["*"] if in_stack else []), *names]))
    form = next((form for pattern, form in config.quantized if fnmatch.fnmatchcase(path, pattern)), None)
    if form is None or form.group is None:
        return form
    group = math.gcd(form.group, shape[-1])
    return dataclasses.replace(form, group=group) if group >= MIN_GROUP else None


def is_of_experts(keys: tuple) -> bool:
    """Return True if the parameter at `keys` has a leading axis of experts."""
    return len(keys) > 1 and keys[-2] in EXPERTS


def formats_of_layers(config: Any, layers: Sequence[int]) -> tuple[tuple[str, WeightFormat | None], ...]:
    """Return the formats of the model that has only these layers of another, in this order."""
    formats: list[tuple[str, WeightFormat | None]] = []
    for pattern, form in config.quantized:
        parts = pattern.split(".")
        if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit():
            places = [place for place, layer in enumerate(layers) if layer == int(parts[1])]
            formats += [(".".join(["layers", str(place), *parts[2:]]), form) for place in places]
        else:
            formats.append((pattern, form))
    return tuple(formats)


def with_formats(shapes: PyTree, config: Any) -> PyTree:
    """Return the shapes of a model's parameters, with those of quantised matrices as `QuantizedArray`."""
    return _map_matrices(shapes, config, lambda leaf, form: form.shapes(leaf.shape, jnp.dtype(leaf.dtype).name))


def quantize_params(params: PyTree, config: Any) -> PyTree:
    """Round the matrices of a model with float parameters to the formats of `config.quantized`."""

    def quantize(leaf, form: WeightFormat) -> QuantizedArray:
        return dataclasses.replace(quantize_rows(leaf.astype(jnp.float32), form), dtype_name=leaf.dtype.name)

    return _map_matrices(params, config, quantize)


def _map_matrices(tree: PyTree, config: Any, change: Callable[[Any, WeightFormat], Any]) -> PyTree:
    """Apply `change` to the parameters that have a format."""

    def visit(path, leaf):
        keys = tuple(entry.key for entry in path)
        in_stack = config.stacked and keys[0] == "layers"
        form = format_of(config, keys, leaf.shape[in_stack:])
        return leaf if form is None else change(leaf, form)

    return jax.tree_util.tree_map_with_path(visit, tree)


def bits_of(dtype: Any) -> int:
    """Return the bits that a number of a dtype takes. Two values of four bits take one byte."""
    return 4 if jnp.dtype(dtype).name in HALF_BYTES else 8 * jnp.dtype(dtype).itemsize


def num_bytes(params: PyTree) -> int:
    """Return the size of parameters or of their shapes in bytes."""
    return sum(math.prod(leaf.shape) * bits_of(leaf.dtype) for leaf in jax.tree.leaves(params)) // 8
