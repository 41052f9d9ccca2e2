"""A model with some of its layers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.bridge import make_model
from specjax.types import Target


def pruned(target: Target, layers: Sequence[int]) -> Target:
    """The target with these of its layers alone, in this order, from 0: what a draft model may begin with.

    Raises: UsageError for layers that it does not have, and for a model that is not of `specjax.models`.
    """
    config, known = target.model.config, target.model.capabilities.num_layers
    if config is None or not isinstance(target.params, dict) or "layers" not in target.params:
        raise UsageError(f"{target.model.name} has no layers by number to keep some of; give a model of specjax.models")
    outside = [layer for layer in layers if not 0 <= layer < known]
    if outside or not 0 < len(layers) <= known:
        raise UsageError(f"the target has layers 0 to {known - 1}; keep one or more of these, not {list(layers)}")
    own = target.params["layers"]
    if all(str(key).isdigit() for key in own):
        keys = sorted(own, key=int)
        kept = {keys[place]: own[keys[layer]] for place, layer in enumerate(layers)}
    else:
        kept = jax.tree.map(lambda x: x[jnp.asarray(layers)], own)
    changes: dict[str, Any] = {"num_layers": len(layers)}
    if hasattr(config, "is_global"):
        changes["is_global"] = tuple(config.is_global[layer] for layer in layers)
    smaller = dataclasses.replace(config, **changes)
    mesh = target.model.mesh
    model = make_model(smaller) if mesh is None else make_model(smaller, mesh)
    return Target(model, target.params | {"layers": kept})
