"""Two deeper after a round that was accepted whole, one less deep after any other.

Source: the heuristic of assisted generation in transformers, `num_assistant_tokens_schedule="heuristic"`.
Deviation: a draft that ended before the limit does not raise it (`controllers.feedback`).
"""

from __future__ import annotations

import functools

from specjax.controllers.feedback import feedback
from specjax.errors import UsageError
from specjax.types import Controller


@functools.cache
def additive(start: int = 5, *, up: int = 2, down: int = 1, least: int = 1, most: int = 20) -> Controller:
    """Limits from `least` to `most`, per row. Raises: UsageError unless 1 <= least <= start <= most; up, down >= 0."""
    if min(up, down) < 0:
        raise UsageError(f"up and down must be at least 0, not {up} and {down}")
    return feedback(start, least, most, lambda limit: limit + up, lambda limit: limit - down)
