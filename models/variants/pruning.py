"""A model with some of its layers alone, or with a part of its MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.bridge import make_model
from specjax.types import Model, Target


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
    if getattr(config, "is_global", None) is not None:
        changes["is_global"] = tuple(config.is_global[layer] for layer in layers)
    return Target(_spread_as(target, dataclasses.replace(config, **changes)), target.params | {"layers": kept})


def narrowed(target: Target, width: int) -> Target:
    """The target with the first `width` hidden units of each MLP alone: slices of its own parameters.

    Raises: UsageError for more than it has, and for a model that is not of `specjax.models`.
    """
    config = target.model.config
    if config is None or not isinstance(target.params, dict) or "layers" not in target.params:
        raise UsageError(f"{target.model.name} has no MLPs to cut; give a model of specjax.models")
    if not 1 <= width <= config.mlp_width:
        raise UsageError(f"an MLP of {config.mlp_width} hidden units has no first {width}")

    def cut(path, leaf):
        names = [getattr(part, "key", None) for part in path]
        if "mlp" not in names:
            return leaf
        return leaf[..., :width] if "down" in names else leaf[..., :width, :]

    layers = jax.tree_util.tree_map_with_path(cut, target.params["layers"])
    return Target(_spread_as(target, dataclasses.replace(config, mlp_width=width)), target.params | {"layers": layers})


def _spread_as(target: Target, config: Any) -> Model:
    """The model of a smaller config, over the same axes of the same mesh."""
    mesh, over = target.model.mesh, target.model.over
    return make_model(config) if mesh is None else make_model(config, mesh, over)
