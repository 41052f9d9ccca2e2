"""Low-rank changes of a model's weights (LoRA: Hu et al. 2021, arXiv 2106.09685): W + (alpha / r) B A."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array, Target


class LowRank(NamedTuple):
    """Of one weight [.., out, in], what stands before is layers."""

    down: Array  # float32[.., r, in], A
    up: Array  # float32[.., out, r], B


Changes = dict[str, LowRank]
"""By the path of the weight."""


def blank_changes(target: Target, key: Array, rank: int = 8, of: tuple[str, ...] = ("q", "v")) -> Changes:
    """Changes of the projections `of` of all layers that change nothing yet: B is zeros.

    Raises: UsageError for a model that has none of that name.
    """
    if rank < 1:
        raise UsageError(f"rank must be at least 1, not {rank}")
    params = target.params if isinstance(target.params, dict) else {}
    leaves = jax.tree_util.tree_flatten_with_path(params.get("layers", {}))[0]
    found: Changes = {}
    for path, weight in leaves:
        names = [getattr(part, "key", None) for part in path]
        if names[-1] == "weight" and names[-2] in of:
            before, (out, fan_in) = weight.shape[:-2], weight.shape[-2:]
            key, own = jax.random.split(key)
            down = jax.random.normal(own, (*before, rank, fan_in)) * fan_in**-0.5
            found[jax.tree_util.keystr(path)] = LowRank(down, jnp.zeros((*before, out, rank)))
    if not found:
        raise UsageError(f"{target.model.name} has no weights called {', '.join(of)} in its layers")
    return found


def changed(target: Target, changes: Changes, alpha: float = 16.0) -> Target:
    """The target with its weights changed: as large and as fast as before."""

    def change(path, weight: Array) -> Array:
        low = changes.get(jax.tree_util.keystr(path))
        if low is None:
            return weight
        return (weight + alpha / low.down.shape[-2] * low.up @ low.down).astype(weight.dtype)

    layers = jax.tree_util.tree_map_with_path(change, target.params["layers"])
    return Target(target.model, target.params | {"layers": layers})
