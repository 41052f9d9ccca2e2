"""Sums in parts: over positions in chunks, and over the rows of a step in batches.

The logits of all positions, or the intermediate results of all rows, are then never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array, PyTree

TARGET = "target"
"""The name of the target's activations, which `sum_in_batches` stores instead of running the target again."""


class MeanSums(Protocol):
    """Sums over positions, a tree of arrays. `means()` returns the batch means that the losses read."""

    def means(self) -> Array: ...


AnySums = TypeVar("AnySums", bound=MeanSums)


def sum_in_two_passes(run: Callable[[PyTree, Array | None], AnySums], params: PyTree, needs_means: bool) -> AnySums:
    """Return `run(params, means)`, where the means over all positions come from a pass without gradients.

    Args: needs_means: False: the losses read no means, or `run` covers all positions at once and computes them itself.
    """
    means = run(jax.lax.stop_gradient(params), None).means() if needs_means else None
    return run(params, means)


def sum_in_batches(function: Callable[..., Any], count: int, params: PyTree, arrays: PyTree) -> Any:
    """Return the sum of `function(params, part)` over `count` parts of arrays with leading axis `count` x rows.

    The backward pass recomputes each part, apart from the results that are named TARGET. The rows of a part are
    `count` apart, so rows that are split over devices stay there.
    """
    if count == 1:
        return function(params, arrays)
    split = lambda x: jnp.asarray(x).reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
    policy = jax.checkpoint_policies.save_only_these_names(TARGET)
    rematerialized = jax.checkpoint(function, policy=policy)
    parts = jax.tree.map(split, arrays)
    shapes = jax.eval_shape(rematerialized, params, jax.tree.map(lambda x: x[0], parts))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = lambda total, part: (jax.tree.map(jnp.add, total, rematerialized(params, part)), None)
    return jax.lax.scan(add, zero, parts)[0]


def map_in_chunks(function: Callable[..., Any], count: int, chunk: int | None, *arguments: Any) -> Any:
    """Return the arrays [B, size, ...] of `function(*arguments, i, size)` for all chunks, joined to [B, count, ...]."""
    if chunk is None or chunk == count:
        return function(*arguments, jnp.int32(0), count)
    parts = jax.lax.map(lambda i: function(*arguments, i, chunk), jnp.arange(0, count, chunk))
    join = lambda x: x.swapaxes(0, 1).reshape(x.shape[1], count, *x.shape[3:])
    return jax.tree.map(join, parts)


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
