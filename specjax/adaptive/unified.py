"""Unified Layer Skipping: every token runs the same few layers, evenly spread.

Liu, Meng, Zhou: Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy (2024),
arXiv 2404.06954.

Rule: K = round(L / speedup) layers, round(linspace(0, L - 1, K)): the first and the last, and as even gaps as may be.
Guarantee: lossy.

Deviations: the prompt runs the same layers, so that the others need neither time nor memory: they are taken out.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.models.variants.layer_skipping import Depth, Places
from specjax.types import Sublayers


def unified(speedup: float = 1.5) -> Depth:
    """For `specjax.adaptive.thinned(target, unified())`. speedup: the layers of the model in those that run."""
    if not speedup >= 1:
        raise UsageError(f"speedup must be at least 1, not {speedup}")
    return _unified(float(speedup))


def kept_layers(speedup: float, num_layers: int) -> tuple[int, ...]:
    """The layers that run."""
    count = max(1, round(num_layers / speedup))
    return tuple(int(layer) for layer in np.round(np.linspace(0, num_layers - 1, count)))


@functools.cache
def _unified(speedup: float) -> Depth:
    def plan(params, places: Places, own, num_layers: int):
        kept = np.isin(np.arange(num_layers), kept_layers(speedup, num_layers))
        return jnp.broadcast_to(kept, (*places.positions.shape, num_layers))

    def runs(carry, layer) -> Sublayers:
        return Sublayers(carry[..., layer], carry[..., layer])

    return Depth(plan=plan, runs=runs, keeps=functools.partial(kept_layers, speedup), name="unified")
