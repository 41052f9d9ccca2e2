"""The wall time of a call, without what JAX spends on tracing and compiling within it."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import jax.monitoring

PREFIX = "/jax/core/compile/"
"""Start of the names of JAX's events about tracing, lowering and compiling."""


class Stopwatch:
    """A context whose wall time is split in two, in seconds.

    Attributes:
      seconds: the time without compilation. compile_seconds: the union of all tracing, lowering and compiling by this
        thread and by those that start within the context. Other threads compile for others.
    """

    def __init__(self) -> None:
        self.seconds, self.compile_seconds = 0.0, 0.0
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        self._others = set(threading.enumerate()) - {threading.current_thread()}
        jax.monitoring.register_event_time_span_listener(self._record)
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        total = time.perf_counter() - self._start
        jax.monitoring.unregister_event_time_span_listener(self._record)
        self.compile_seconds = _length_of_union(self._spans)
        self.seconds = total - self.compile_seconds

    def _record(self, event: str, start_time: float, end_time: float, **metadata: str | int) -> None:
        """Record a span that has just ended. Its times are those of a clock that may be set, the lengths matter."""
        if event.startswith(PREFIX) and threading.current_thread() not in self._others:
            end = time.perf_counter()
            self._spans.append((max(end - (end_time - start_time), self._start), end))


def _length_of_union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union. Spans of inner functions lie within those of outer ones."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, last), 0.0)
        last = max(last, end)
    return total
