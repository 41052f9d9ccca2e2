"""What controllers share that raise the limit after a success and lower it after a failure."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array, Controller, Info


def feedback(
    start: int, least: int, most: int, raised: Callable[[Array], Array], lowered: Callable[[Array], Array]
) -> Controller:
    """A limit int32[B] that is `raised` once a draft as deep as it was accepted whole, `lowered` after a rejection.

    A draft that was shorter for another reason (a stop rule, the tree's depth, the end of the text) and accepted whole
    says nothing about a larger limit, which then stays; so the limit cannot run away from what the drafter can draft.

    Raises: UsageError unless 1 <= least <= start <= most; at 0 nothing more would be learnt.
    """
    if not 1 <= least <= start <= most:
        raise UsageError(f"depths must satisfy 1 <= least <= start <= most, not {least}, {start} and {most}")

    def update(limit: Array, info: Info) -> Array:
        whole = info.accepted >= info.drafted_depth
        larger = jnp.where(info.drafted_depth >= limit, jnp.minimum(raised(limit), most), limit)
        changed = jnp.where(whole, larger, jnp.maximum(lowered(limit), least))
        return jnp.where(info.active & (info.drafted_depth > 0), changed, limit)

    return Controller(init=lambda batch: jnp.full((batch,), start, jnp.int32), limit=lambda limit: limit, update=update)
