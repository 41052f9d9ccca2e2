"""The pace at which prompts are read while other rows decode."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

MAX_SLOWDOWN = 1.5
"""Default of the mean time of a turn with reading, in turns without."""
RECENT = 9
"""Turns whose median is the time of a step or a chunk. The first ones may compile."""


class Pace:
    """A rule for the turns in which a chunk of a prompt is read.

    Each step earns a part of its time. A chunk is read when its time was earned. So the mean time between two tokens of
    a row stays within `max_slowdown` of that without reading, and the longest pause is a step and a chunk.
    """

    def __init__(self, max_slowdown: float = MAX_SLOWDOWN, clock: Callable[[], float] = time.perf_counter):
        """Start without measurements. `max_slowdown` is at least 1; at 1, prompts are read when no row decodes."""
        self.max_slowdown, self._clock = max_slowdown, clock
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._chunks: deque[float] = deque(maxlen=RECENT)
        self._earned, self._time = 0.0, clock()
        self._decoded = self._read = False  # in the previous turn, whose results this turn waits for

    @property
    def may_read(self) -> bool:
        """Return True if the next turn may read a chunk while rows decode.

        A step is measured first, and then one chunk.
        """
        if self.max_slowdown == 1 or not self._steps:
            return False
        return self._earned >= statistics.median(self._chunks) if self._chunks else not self._read

    def record(self, *, decodes: bool, reads: bool) -> None:
        """Record that a turn ended, which dispatched a step (`decodes`) and a chunk (`reads`)."""
        start, self._time = self._time, self._clock()
        seconds = self._time - start
        if self._decoded and self._read:
            self._chunks.append(max(seconds - statistics.median(self._steps), 0.0))
        elif self._decoded:
            self._steps.append(seconds)
        self._decoded, self._read = decodes, reads and decodes
        if not (decodes and self._steps):
            return
        step, chunk = (statistics.median(times) if times else 0.0 for times in (self._steps, self._chunks))
        if reads:
            self._earned -= chunk
        self._earned = min(self._earned + (self.max_slowdown - 1) * step, chunk + step)
