"""The time that JAX spends on tracing and compiling, within a call that also runs the programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax.monitoring

PREFIX = "/jax/core/compile/"
"""Start of the names of JAX's events about tracing, lowering and compiling."""


class Compilation:
    """The spans of time of compilations. Those of inner functions lie within those of outer ones."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __call__(self, event: str, start_time: float, end_time: float, **metadata: str | int) -> None:
        """Record a span of time of JAX, in seconds."""
        if event.startswith(PREFIX):
            self._spans.append((start_time, end_time))

    @property
    def seconds(self) -> float:
        """Return the length of the union of all spans."""
        total, last = 0.0, float("-inf")
        for start, end in sorted(self._spans):
            total += max(end - max(start, last), 0.0)
            last = max(last, end)
        return total


@contextlib.contextmanager
def count_compilation() -> Iterator[Compilation]:
    """Measure the compilations of all threads within the context."""
    compilation = Compilation()
    jax.monitoring.register_event_time_span_listener(compilation)
    try:
        yield compilation
    finally:
        jax.monitoring.unregister_event_time_span_listener(compilation)
