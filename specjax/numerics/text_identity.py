"""The promise about a text: how far rounding may change it relative to plain decoding with the same keys.

Methods are exact for real numbers. In floating point, passes of two widths round differently, and two logits that are
closer than this difference may change places. The dtype and the device decide how often that happens.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.arrays import platforms
from specjax.arrays.modes import FULL_PRECISION, matmul_precision
from specjax.numerics.quantized_array import QuantizedArray
from specjax.types import Model, Target

TextIdentity = Literal["exact", "same bits", "near-ties possible"]

EXACT: TextIdentity = "exact"
"""float32 throughout: logits of two pass widths differ by about 1e-4, so only ties within that can change a token."""
SAME_BITS: TextIdentity = "same bits"
"""Logits have the same bits in every pass, so no token changes."""
NEAR_TIES: TextIdentity = "near-ties possible"
"""Some numbers are rounded to fewer bits, so tokens with nearly equal logits may change places."""
QUANTIZED = frozenset({"int2", "int4", "int8", "uint2", "uint4", "uint8"})
"""Dtypes of caches with keys and values that are rounded to whole numbers and scales."""


def text_identity(target: Target) -> TextIdentity:
    """Return what rounding can do to the texts of a target on this backend.

    It applies to methods whose text equals that of plain decoding for real numbers (`specjax methods`).
    """
    if getattr(target.model.config, "same_bits", False):
        return SAME_BITS
    return NEAR_TIES if explain_rounding(target) else EXACT


def explain_rounding(target: Target) -> str | None:
    """Return the numbers that are rounded to fewer bits than float32, in words; None: all are float32."""
    model = target.model
    config = model.config or getattr(model, "base_config", None)  # other kinds of models always have a config
    is_matrix = lambda leaf: isinstance(leaf, QuantizedArray)
    leaves = jax.tree.leaves(target, is_leaf=is_matrix)
    dtypes = [leaf.dtype if is_matrix(leaf) else jnp.result_type(leaf) for leaf in leaves]
    for dtype in [*dtypes, *_dtype_of(config)]:
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            return f"{dtype.name} numbers"
    for _, form in getattr(config, "quantized", ()):
        if form is not None and form.inputs is not None:  # a number may be rounded to another one after a last bit
            return f"activations to {form.inputs}"
    cache_dtype = getattr(config, "cache_dtype", None)
    if cache_dtype is None:
        cache_dtype = _narrow_dtype_of_cache(target)
    if cache_dtype is not None:
        return f"the {cache_dtype} cache"
    precision = matmul_precision()
    if platforms.of_program() != "cpu" and precision not in FULL_PRECISION:
        return f"float32 products of precision {precision}"
    return None


def _narrow_dtype_of_cache(target: Target) -> str | None:
    """Return the name of a dtype of fewer bits than float32 in the cache, which a model without a config may have."""
    model = target.model
    if not isinstance(model, Model) or model.config is not None or model.capabilities.inputs:
        return None
    cache = jax.eval_shape(lambda params: model.init_cache(params, None, 1, 1), target.params)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(cache)]
    is_narrow = lambda dtype: (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4) or dtype.name in QUANTIZED
    return next((dtype.name for dtype in dtypes if is_narrow(dtype)), None)


def _dtype_of(config: Any) -> list[Any]:
    """Return the dtype of a config, of the cache or of activations, which parameters of float32 do not show."""
    dtype = getattr(config, "dtype", None)
    try:
        return [] if dtype is None else [jnp.dtype(dtype)]
    except TypeError:  # a custom model's config may have another meaning of the name
        return []


def describe_identity(target: Target) -> str:
    """Return the promise in words, for the lines of a session."""
    identity = text_identity(target)
    if identity == SAME_BITS:
        return "same bits: rounding changes no text"
    if identity == EXACT:
        return "exact: rounding changes no text, except at ties within float32 rounding"
    return f"near-ties possible: the rounding of {explain_rounding(target)} depends on the width of a pass"
