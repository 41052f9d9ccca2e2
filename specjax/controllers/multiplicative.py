"""Multiplicative increase and decrease: twice as deep after a fully accepted draft, half as deep after a rejection.

This rule is ours, after the congestion windows of TCP. A run of rejections ends deep drafts in logarithmically many
steps.
"""

from __future__ import annotations

import functools

from specjax.controllers.feedback import feedback
from specjax.types import Controller


@functools.cache
def multiplicative(start: int = 4, *, low: int = 1, high: int = 16) -> Controller:
    """Build a controller with depths from `low` to `high`, per row.

    Raises: UsageError unless 1 <= low <= start <= high.
    """
    return feedback(start, low, high, lambda limit: 2 * limit, lambda limit: limit // 2)
