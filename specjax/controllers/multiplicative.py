"""Twice as deep after a round that was accepted whole, half as deep after any other.

Our choice, after the windows of congestion control: a chain of rejections ends deep drafts in log steps.
"""

from __future__ import annotations

import functools

from specjax.controllers.feedback import feedback
from specjax.types import Controller


@functools.cache
def multiplicative(start: int = 4, *, least: int = 1, most: int = 16) -> Controller:
    """Limits from `least` to `most`, per row. Raises: UsageError unless 1 <= least <= start <= most."""
    return feedback(start, least, most, lambda limit: 2 * limit, lambda limit: limit // 2)
