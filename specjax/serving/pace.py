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
LONGEST = 8
"""Largest cost of a chunk in costs of a median chunk. What takes longer, such as a compilation, is not reading."""
STALE = 32
"""Turns without a measurement of a step alone, after which one is made."""


class Pace:
    """A rule for the turns in which a chunk of a prompt is read.

    Each step earns a part of its time. A chunk is read when its time was earned, and it costs the time that it took.
    This includes all work of the admission: a new state, stored chunks that are copied, and the row that is entered.
    So the mean time between two tokens of a row stays within `max_slowdown` of that without reading, and the longest
    pause is a step and a chunk.
    """

    def __init__(self, max_slowdown: float = MAX_SLOWDOWN, clock: Callable[[], float] = time.perf_counter):
        """Start without measurements. `max_slowdown` is at least 1; at 1, prompts are read when no row decodes."""
        self.max_slowdown, self._clock = max_slowdown, clock
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._chunks: deque[float] = deque(maxlen=RECENT)
        self._earned, self._time = 0.0, clock()
        self._decoded = self._read = self._changed = False  # in the previous turn, whose results this turn waits for
        self._cost: float | None = None  # of the newest chunk, as far as it is measured
        self._num_chunks = self._age = 0  # chunks that were read, and turns since a step was measured alone

    @property
    def may_read(self) -> bool:
        """Return True if the next turn may read a chunk while rows decode.

        A step is measured first, and then one chunk.
        """
        if self.max_slowdown == 1 or not self._steps or STALE <= self._age < STALE + 4:
            return False
        return self._earned >= statistics.median(self._chunks) if self._chunks else not self._read

    def record(self, *, decodes: bool, reads: bool, changes: bool = False) -> None:
        """Record that a turn ended.

        Args:
          decodes, reads: True if it dispatched a step, and a chunk. changes: True if a request came or ended.
        """
        start, self._time = self._time, self._clock()
        seconds, is_read = self._time - start, reads and decodes
        if not self._read:
            self._end_chunk()
        if is_read and self._cost is None:
            self._cost = 0.0
        if self._decoded and decodes:
            if not (is_read or self._read or changes or self._changed):
                self._steps.append(seconds)
                self._age = 0
            else:
                self._age += 1
                # a device can run a chunk in the turn that dispatches it, or while the next one waits for its results
                self._pay(seconds)
        if is_read and self._read:
            self._end_chunk()
            self._cost = 0.0
        self._decoded, self._read, self._changed = decodes, is_read, changes
        if decodes and self._steps:
            step, chunk = (statistics.median(times) if times else 0.0 for times in (self._steps, self._chunks))
            part = (self.max_slowdown - 1) * step
            self._earned = min(self._earned + part, chunk + part)

    def _pay(self, seconds: float) -> None:
        """Take what a turn cost beyond a step from what was earned."""
        if self._steps:
            cost = seconds - statistics.median(self._steps)
            largest = LONGEST * statistics.median(self._chunks) if self._chunks else 0.0
            self._earned -= min(cost, largest)
            if self._cost is not None:
                self._cost += cost

    def _end_chunk(self) -> None:
        """Store the cost of the newest chunk, except that of the first one, which may compile."""
        if self._cost is not None:
            self._num_chunks += 1
            if self._num_chunks > 1:
                self._chunks.append(max(self._cost, 0.0))
            self._cost = None
