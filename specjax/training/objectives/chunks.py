"""Sums over many places, some at a time, so that what each says of the vocabulary is never there for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError


def sum_in_chunks(some: Callable[..., Any], count: int, chunk: int | None, *arguments: Any) -> Any:
    """The sum of `some(*arguments, i, size)`, of `size` of `count` places from i on: any tree of arrays.

    chunk: how many at a time, a divisor of `count`; what they compute is made again for the derivatives. None: all, and
      nothing is made again. Derivatives are with respect to `arguments`.
    """
    if chunk is None or chunk == count:
        return some(*arguments, jnp.int32(0), count)
    if count % chunk:
        raise UsageError(f"chunk must divide the {count} places of a row, and {chunk} does not")
    again = jax.checkpoint(lambda i, *arguments: some(*arguments, i, chunk))
    shapes = jax.eval_shape(again, jnp.int32(0), *arguments)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total, i):
        return jax.tree.map(jnp.add, total, again(i, *arguments)), None

    return jax.lax.scan(add, zero, jnp.arange(0, count, chunk))[0]
