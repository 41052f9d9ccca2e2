"""BASS: one depth for the whole batch, raised once any row accepts a draft whole.

Qian et al.: BASS: Batched Attention-optimized Speculative Sampling (2024), arXiv 2404.15778.

Rule: l starts at 7. If some row accepted all l tokens, l <- min(l + 2, 32). Else l <- max(1, the most tokens that a row
accepted, l - ceil(l / 10) - s), where s is 1 if the step before lowered l too, else 0.
Guarantee: distribution, as of every controller.
Deviations: the constants are from memory. Rows that drafted nothing do not count, nor do those that have ended; where
no draft was rejected and none was l deep, l stays (as in `controllers.feedback`).
As all rows share l, a sampled text, not its distribution, depends on the other rows; greedy and coupled texts do not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.batch_axes import shared
from specjax.errors import UsageError
from specjax.types import Array, Controller, Info


class _State(NamedTuple):
    limit: Array  # int32[B], l in every row
    lowered: Array  # bool[], by the last step that said something


@functools.cache
def bass(start: int = 7, *, up: int = 2, part: int = 10, most: int = 32) -> Controller:
    """Limits from 1 to `most`, the same for all rows; a failure takes one `part`-th of it, rounded up, and s.

    Raises: UsageError unless 1 <= start <= most, up >= 0 and part >= 1.
    """
    if not 1 <= start <= most:
        raise UsageError(f"depths must satisfy 1 <= start <= most, not {start} and {most}")
    if up < 0 or part < 1:
        raise UsageError(f"up must be at least 0 and part at least 1, not {up} and {part}")

    def update(state: _State, info: Info) -> _State:
        limit = state.limit
        counts = info.active & (info.drafted_depth > 0)
        whole = info.accepted >= info.drafted_depth
        raised = jnp.any(counts & whole & (info.drafted_depth >= limit))
        lowered = jnp.any(counts & ~whole) & ~raised
        least = jnp.max(info.accepted, initial=1, where=counts)
        less = jnp.maximum(limit - (limit + part - 1) // part - state.lowered, least)
        changed = jnp.where(raised, jnp.minimum(limit + up, most), jnp.where(lowered, less, limit))
        return _State(changed, jnp.where(raised | lowered, lowered, state.lowered))

    return Controller(
        init=lambda batch: _State(jnp.full((batch,), start, jnp.int32), jnp.array(False)),
        limit=lambda state: state.limit,
        update=update,
        axes=shared,
    )
