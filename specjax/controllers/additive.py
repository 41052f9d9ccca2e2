"""Additive increase and decrease: two tokens deeper after a fully accepted draft, one less after a rejection.

Source: the heuristic of assisted generation in transformers, `num_assistant_tokens_schedule="heuristic"`.
Deviation: a draft that ended before the limit does not raise it (`controllers.feedback`).
"""

from __future__ import annotations

import functools

from specjax.controllers.feedback import feedback
from specjax.errors import UsageError
from specjax.types import Controller


@functools.cache
def additive(start: int = 5, *, up: int = 2, down: int = 1, low: int = 1, high: int = 20) -> Controller:
    """Build a controller with depths from `low` to `high`, per row.

    Raises: UsageError unless 1 <= low <= start <= high; up, down >= 0.
    """
    if min(up, down) < 0:
        raise UsageError(f"up and down must be at least 0, not {up} and {down}")
    return feedback(start, low, high, lambda limit: limit + up, lambda limit: limit - down)
