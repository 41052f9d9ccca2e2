"""The shared part of controllers that raise the limit after a success and lower it after a failure."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array, Controller, Info


def feedback(
    start: int, low: int, high: int, increase: Callable[[Array], Array], decrease: Callable[[Array], Array]
) -> Controller:
    """Build a controller whose limit int32[B] is raised after a fully accepted draft and lowered after a rejection.

    A draft may end before the limit because of a stop condition, the depth of the tree or the end of the text. If it is
    fully accepted, the limit stays, so it cannot grow beyond the depth that the drafter reaches.

    Raises: UsageError unless 1 <= low <= start <= high. A limit of 0 would never recover.
    """
    if not 1 <= low <= start <= high:
        raise UsageError(f"depths must satisfy 1 <= low <= start <= high, not {low}, {start} and {high}")

    def update(limit: Array, info: Info) -> Array:
        fully_accepted = info.accepted >= info.drafted_depth
        larger = jnp.where(info.drafted_depth >= limit, jnp.minimum(increase(limit), high), limit)
        changed = jnp.where(fully_accepted, larger, jnp.maximum(decrease(limit), low))
        return jnp.where(info.active & (info.drafted_depth > 0), changed, limit)

    return Controller(init=lambda batch: jnp.full((batch,), start, jnp.int32), limit=lambda limit: limit, update=update)
