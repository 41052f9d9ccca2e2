"""Unified Layer Skipping: every token runs the same few layers, at even distances.

Liu, Meng, Zhou: Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy (2024),
arXiv 2404.06954.

Rule: K = round(L / speedup) of the L layers run, round(linspace(0, L - 1, K)). These are the first, the last, and
layers in between at distances that are as even as possible.
Guarantee: lossy.

Deviations: the prompt runs the same layers. The other layers need neither time nor memory, because they are removed.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from specjax.catalog import Method, Option
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, TokenPositions
from specjax.types import Sublayers

METHOD = Method(
    name="unified",
    kind="adaptive",
    guarantee="lossy",
    summary="runs the same evenly spaced layers for every token",
    paper="Liu et al. 2024, arXiv 2404.06954",
    options=(Option("speedup", "float", 1.5, "all layers divided by the layers that run"),),
)


def unified(speedup: float = 1.5) -> DepthPolicy:
    """Return the depth policy for `specjax.adaptive.skip_layers(target, unified())`.

    speedup: the ratio of the model's layers to the layers that run.
    """
    if not speedup >= 1:
        raise UsageError(f"speedup must be at least 1, not {speedup}")
    return _unified(float(speedup))


def kept_layers(speedup: float, num_layers: int) -> tuple[int, ...]:
    """Return the layers that run."""
    count = max(1, round(num_layers / speedup))
    return tuple(int(layer) for layer in np.round(np.linspace(0, num_layers - 1, count)))


@functools.cache
def _unified(speedup: float) -> DepthPolicy:
    def plan(params, places: TokenPositions, state, num_layers: int):
        layers = np.isin(np.arange(num_layers), kept_layers(speedup, num_layers))
        return jnp.broadcast_to(layers, (*places.positions.shape, num_layers))

    def runs(carry, layer) -> Sublayers:
        return Sublayers(carry[..., layer], carry[..., layer])

    return DepthPolicy(plan=plan, runs=runs, kept_layers=functools.partial(kept_layers, speedup), name="unified")
