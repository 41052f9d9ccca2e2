"""SkipDecode: later tokens run fewer layers.

Del Corro, Del Giorno, Agarwal, Yu, Awadallah, Mukherjee: SkipDecode: Autoregressive Skip Decoding with Batching and
Caching for Efficient LLM Inference (2023), arXiv 2307.02628.

Rule: the t-th generated token runs b(t) = round(b_max - (b_max - b_min) t / T) of the L layers, and b_min after T. It
runs the first w and the last b(t) - w layers. These sets are nested, so a layer that runs has the keys and values of
all earlier tokens.
Guarantee: lossy.

Deviations: the defaults of w, b_max and b_min are our own choices. Each row counts the tokens after its own prompt, and
a batch skips only the layers that all of its rows skip. Rows that start together skip the same layers.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, TokenPositions
from specjax.types import Array, Sublayers

METHOD = Method(
    name="skip_decode",
    kind="adaptive",
    guarantee="lossy",
    summary="runs fewer of the middle layers for later tokens",
    paper="Del Corro et al. 2023, arXiv 2307.02628",
    options=(
        Option("speedup", "float", 1.5, "all layers divided by the mean number of layers per token"),
        Option("max_layers", "int", None, "layers of the first token; default: 1.5 times the mean"),
        Option("min_layers", "int", None, "layers of the last token; default: the number that gives the mean"),
        Option("warm_up", "int", 1, "first layers that every token runs"),
        shared.HORIZON,
    ),
)


def skip_decode(
    speedup: float = 1.5,
    *,
    max_layers: int | None = None,
    min_layers: int | None = None,
    warm_up: int = 1,
    horizon: int = 128,
) -> DepthPolicy:
    """Return the depth policy for `specjax.adaptive.skip_layers(target, skip_decode())`.

    Args:
      speedup: the mean of the budgets is L / speedup. max_layers, min_layers: b_max and b_min. By default b_max is
        1.5 times the mean, at most L, and b_min is twice the mean minus b_max.
      warm_up: w, layers at the bottom that every token runs. horizon: T.
    """
    if not speedup >= 1:
        raise UsageError(f"speedup must be at least 1, not {speedup}")
    if warm_up < 1 or horizon < 1:
        raise UsageError(f"warm_up and horizon must be at least 1, not {warm_up} and {horizon}")
    return _skip_decode(float(speedup), max_layers, min_layers, warm_up, horizon)


@functools.cache
def _skip_decode(
    speedup: float, max_layers: int | None, min_layers: int | None, warm_up: int, horizon: int
) -> DepthPolicy:
    bounds = functools.partial(budgets, speedup, max_layers, min_layers, warm_up)

    def plan(params, places: TokenPositions, state, num_layers: int) -> Array:
        high, low = bounds(num_layers)
        share = jnp.minimum(places.num_generated, horizon) / horizon
        budget = jnp.round(high - (high - low) * share).astype(jnp.int32)
        return jnp.where(places.is_generated, num_layers - budget, 0)  # number of skipped layers

    def runs(skipped: Array, layer) -> Sublayers:
        layer_runs = (layer < warm_up) | (layer >= warm_up + skipped)
        return Sublayers(layer_runs, layer_runs)

    return DepthPolicy(plan=plan, runs=runs, check=lambda num_layers: bounds(num_layers) and None, name="skip_decode")


def budgets(
    speedup: float, max_layers: int | None, min_layers: int | None, warm_up: int, num_layers: int
) -> tuple[int, int]:
    """Return (b_max, b_min). Raises: UsageError for budgets outside the model's number of layers."""
    mean = num_layers / speedup
    high = round(min(num_layers, 1.5 * mean)) if max_layers is None else max_layers
    low = max(round(2 * mean - high), min(warm_up + 1, high)) if min_layers is None else min_layers
    if not min(warm_up, num_layers) <= low <= high <= num_layers:
        raise UsageError(
            f"max_layers and min_layers must be from warm_up, {warm_up}, to the {num_layers} layers of the model, "
            f"min_layers no more than max_layers, not {high} and {low}"
        )
    return high, low
