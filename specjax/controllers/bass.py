"""BASS: one draft depth for the whole batch, raised when any row accepts a complete draft.

Qian et al.: BASS: Batched Attention-optimized Speculative Sampling (2024), arXiv 2404.15778.

Rule: the depth l starts at 7. If some row accepted all l tokens, l <- min(l + 2, 32). Otherwise
l <- max(1, largest number of tokens that a row accepted, l - ceil(l / 10) - s). s is 1 if the previous step also
lowered l, else 0.
Guarantee: distribution, as for every controller.
Deviations: the constants were not checked against the paper. Rows without a draft and finished rows do not count. If no
draft was rejected and none was l deep, l stays (as in `controllers.feedback`).
All rows share l, so a sampled text depends on the other rows of the batch, but its distribution does not. Greedy and
coupled texts do not depend on them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.batch_axes import shared
from specjax.errors import UsageError
from specjax.types import Array, Controller, Info


class State(NamedTuple):
    limit: Array  # int32[B], l in every row
    lowered: Array  # bool[], True if the last informative step lowered the limit


@functools.cache
def bass(start: int = 7, *, up: int = 2, part: int = 10, high: int = 32) -> Controller:
    """Build a controller with depths from 1 to `high`, equal for all rows. A failure subtracts ceil(l / part) + s.

    Raises: UsageError unless 1 <= start <= high, up >= 0 and part >= 1.
    """
    if not 1 <= start <= high:
        raise UsageError(f"depths must satisfy 1 <= start <= high, not {start} and {high}")
    if up < 0 or part < 1:
        raise UsageError(f"up must be at least 0 and part at least 1, not {up} and {part}")

    def update(state: State, info: Info) -> State:
        limit = state.limit
        counts = info.active & (info.drafted_depth > 0)
        fully_accepted = info.accepted >= info.drafted_depth
        raised = jnp.any(counts & fully_accepted & (info.drafted_depth >= limit))
        lowered = jnp.any(counts & ~fully_accepted) & ~raised
        low = jnp.max(info.accepted, initial=1, where=counts)
        reduced = jnp.maximum(limit - (limit + part - 1) // part - state.lowered, low)
        changed = jnp.where(raised, jnp.minimum(limit + up, high), jnp.where(lowered, reduced, limit))
        return State(changed, jnp.where(raised | lowered, lowered, state.lowered))

    return Controller(
        init=lambda batch: State(jnp.full((batch,), start, jnp.int32), jnp.array(False)),
        limit=lambda state: state.limit,
        update=update,
        axes=shared,
    )
