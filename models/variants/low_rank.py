"""Low-rank updates of a model's weights (LoRA: Hu et al. 2021, arXiv 2106.09685): W + (alpha / r) B A."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.storage import join_projections, split_projections
from specjax.models.variants.expanding import check_trainable
from specjax.types import Array, Target


class LoraMatrices(NamedTuple):
    """The update of one weight [.., out, in]. Leading axes count layers."""

    down: Array  # float32[.., r, in], A
    up: Array  # float32[.., out, r], B


LoraWeights = dict[str, LoraMatrices]
"""Updates by the path of the weight."""


def init_lora(target: Target, key: Array, rank: int = 8, projections: tuple[str, ...] = ("q", "v")) -> LoraWeights:
    """Create updates of these projections of all layers that leave the model unchanged: B is zero.

    Raises: UsageError for a model without weights of these names, or with quantised ones.
    """
    if rank < 1:
        raise UsageError(f"rank must be at least 1, not {rank}")
    check_trainable(target.params, target.model.name)
    params = _separate(target)
    leaves = jax.tree_util.tree_flatten_with_path(params.get("layers", {}))[0]
    weights: LoraWeights = {}
    for path, weight in leaves:
        names = [getattr(part, "key", None) for part in path]
        if names[-1] == "weight" and names[-2] in projections:
            leading, (out, fan_in) = weight.shape[:-2], weight.shape[-2:]
            key, subkey = jax.random.split(key)
            down = jax.random.normal(subkey, (*leading, rank, fan_in)) * fan_in**-0.5
            weights[jax.tree_util.keystr(path)] = LoraMatrices(down, jnp.zeros((*leading, out, rank)))
    if not weights:
        raise UsageError(f"{target.model.name} has no weights with the names {', '.join(projections)} in its layers")
    return weights


def apply_lora(target: Target, lora: LoraWeights, alpha: float = 16.0) -> Target:
    """Return the target with updated weights, at the same size, in the same form and at the same speed.

    Raises: UsageError for a model with quantised weights.
    """
    check_trainable(target.params, target.model.name)

    def add(path, weight: Array) -> Array:
        matrices = lora.get(jax.tree_util.keystr(path))
        if matrices is None:
            return weight
        return (weight + alpha / matrices.down.shape[-2] * matrices.up @ matrices.down).astype(weight.dtype)

    params = _separate(target)
    layers = jax.tree_util.tree_map_with_path(add, params["layers"])
    return Target(target.model, join_projections(params | {"layers": layers}, target.model.config))


def _separate(target: Target) -> dict:
    """Return the parameters with separate projections; an empty dict for models with other parameters."""
    return split_projections(target.params, target.model.config) if isinstance(target.params, dict) else {}
