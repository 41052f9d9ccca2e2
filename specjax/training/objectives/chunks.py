"""Sums over positions in chunks, so that the logits of all positions are never in memory together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError


def sum_in_chunks(function: Callable[..., Any], count: int, chunk: int | None, *arguments: Any) -> Any:
    """Return the sum of `function(*arguments, i, size)`, a tree of arrays, over chunks of `count` positions.

    Each call covers `size` positions from i on. The sum is differentiable with respect to `arguments`.

    Args: chunk: positions per call, a divisor of `count`. The backward pass recomputes each chunk. None: one call
      covers all positions, and nothing is recomputed.
    """
    if chunk is None or chunk == count:
        return function(*arguments, jnp.int32(0), count)
    if count % chunk:
        raise UsageError(f"chunk must divide the {count} positions of a row, but {chunk} does not")
    rematerialized = jax.checkpoint(lambda i, *arguments: function(*arguments, i, chunk))
    shapes = jax.eval_shape(rematerialized, jnp.int32(0), *arguments)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total, i):
        return jax.tree.map(jnp.add, total, rematerialized(i, *arguments)), None

    return jax.lax.scan(add, zero, jnp.arange(0, count, chunk))[0]
