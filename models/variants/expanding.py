"""Float copies of quantised models, from which training can start."""

from __future__ import annotations

import dataclasses

import jax

from specjax.catalog.schemes import without_scheme
from specjax.errors import UsageError
from specjax.models.storage.format_names import describe_formats
from specjax.models.variants.pruning import rebuild_model
from specjax.numerics.quantized_array import as_float_weights, is_quantized
from specjax.types import PyTree, Target


def check_trainable(params: PyTree, name: str) -> None:
    """Raise a UsageError if a parameter to change is quantised. Rounded values have no gradient. name: of the model."""
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        raise UsageError(
            f"the weights of {name} are quantised, and training and low-rank updates change float weights only; load "
            "it without quantize, and with keep_quantized=False"
        )


def expand_target(target: Target) -> Target:
    """Return a model with its quantised matrices expanded to the dtype for which they stand.

    A model without quantised matrices is returned unchanged.
    """
    if describe_formats(target.model.config) is None:
        return target
    config = dataclasses.replace(target.model.config, quantized=(), name=without_scheme(target.model.name))
    return Target(rebuild_model(target, config), as_float_weights(target.params))
