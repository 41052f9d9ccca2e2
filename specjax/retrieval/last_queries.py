"""The last tokens of a text, whose queries decide which cached tokens matter."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.texts import causal_mask
from specjax.errors import UsageError
from specjax.types import Array, Model, PyTree, Target


class LastTokens(NamedTuple):
    """The last T tokens of a text, in each layer."""

    queries: tuple[Array, ...]  # [B, T, H, h]
    positions: Array  # int32[B, T]
    pending: PyTree  # their cache entries


def last_queries(
    target: Target, tokens: Array, cache: PyTree, cached: Array, count: int
) -> tuple[tuple[Array, ...], Array]:
    """Return the queries [B, T, H, h] of the last `count` cached tokens in each layer, and their positions int32[B, T].

    Args:
      tokens: int32[B, L], the text. cache: its first `cached` int32[B] tokens.
    """
    last = read_last(target, tokens, cache, cached, count)
    return last.queries, last.positions


def read_last(target: Target, tokens: Array, cache: PyTree, length: Array, count: int) -> LastTokens:
    """Read the last `count` of the first `length` int32[B] tokens of a text int32[B, L].

    cache: has at least the tokens before these.
    """
    model = target.model
    start = jnp.maximum(length - count, 0)
    positions = start[:, None] + jnp.arange(count)
    tokens = take_along(tokens, positions, 1)
    output, pending = model.forward(
        target.params, tokens, model.rewind_cache(cache, start), positions=positions,
        mask=causal_mask(*tokens.shape), taps=tuple(range(model.capabilities.num_layers)),
    )  # fmt: skip
    assert model.queries is not None
    return LastTokens(model.queries(target.params, output.taps, positions), positions, pending)


def check_full_attention(model: Model, method: str, fix: str) -> None:
    """Raise a UsageError for a model without a cache of keys and values on one device, or with windows of attention."""
    check_keys(model, method, fix)
    if model.config.window is not None:
        reason = "attends within windows, which a selection would shift"
        raise UsageError(f"the model {model.name} {reason}, which {method} needs; {fix}")


def check_keys(model: Model, method: str, fix: str) -> None:
    """Raise a UsageError for a model without a cache of keys and values on one device."""
    if model.queries is None or model.config is None:
        reason = "has no cache of keys and values on one device"
        raise UsageError(f"the model {model.name} {reason}, which {method} needs; {fix}")
