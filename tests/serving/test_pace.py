"""The pace of reading: rows that decode keep their part of the time."""

import pytest

from specjax.serving.pace import Pace


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("late", [0, 20])  # turns before the first prompt
@pytest.mark.parametrize(
    "slowdown, step, chunk", [(1.5, 1.0, 1.0), (1.5, 1.0, 4.0), (1.1, 0.01, 0.002), (2.0, 1.0, 9.0)]
)
def test_the_mean_time_between_tokens_stays_within_the_slowdown(slowdown, step, chunk, late):
    clock = Clock()
    pace, pending, reads = Pace(slowdown, clock), 0.0, 0
    turns = 2000
    for turn in range(turns):
        may_read = turn >= late and pace.may_read
        clock.now += pending  # a turn waits for what the turn before dispatched
        pending = step + (chunk if may_read else 0)
        reads += may_read
        pace.record(decodes=True, reads=may_read)
    mean = clock.now / turns
    assert mean <= step * slowdown * 1.02
    expected = turns * step * (slowdown - 1) / chunk
    assert min(expected, turns) * 0.9 <= reads


def test_prompts_wait_at_a_slowdown_of_1():
    pace = Pace(1.0, Clock())
    pace.record(decodes=True, reads=False)
    assert not pace.may_read
