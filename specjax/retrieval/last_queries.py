"""The queries of the last tokens of a text, which decide which cached tokens matter."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.texts import causal_mask
from specjax.errors import UsageError
from specjax.types import Array, Model, PyTree, Target


def last_queries(
    target: Target, tokens: Array, cache: PyTree, cached: Array, count: int
) -> tuple[tuple[Array, ...], Array]:
    """Return the queries [B, T, H, h] of the last `count` cached tokens in each layer, and their positions int32[B, T].

    Args:
      tokens: int32[B, L], the text. cache: its first `cached` int32[B] tokens.
    """
    model = target.model
    start = jnp.maximum(cached - count, 0)
    positions = start[:, None] + jnp.arange(count)
    tokens = take_along(tokens, positions, 1)
    output, _ = model.forward(
        target.params, tokens, model.rewind_cache(cache, start), positions=positions,
        mask=causal_mask(*tokens.shape), taps=tuple(range(model.capabilities.num_layers)),
    )  # fmt: skip
    assert model.queries is not None
    return model.queries(target.params, output.taps, positions), positions


def check_full_attention(model: Model, method: str, fix: str) -> None:
    """Raise a UsageError for a model without a cache of keys and values on one device, or with windows of attention."""
    if model.queries is None or model.config is None:
        reason = "has no cache of keys and values on one device"
    elif model.config.window is not None:
        reason = "attends within windows, which a selection would shift"
    else:
        return
    raise UsageError(f"the model {model.name} {reason}, which {method} needs; {fix}")
