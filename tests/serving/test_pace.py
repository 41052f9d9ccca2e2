"""The pace of reading: rows that decode keep their part of the time."""

import pytest

from specjax.serving.pace import LONGEST, Pace


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(pace, clock, step, chunk, *, turns=2000, late=0, is_async=True, admission=0.0, num_chunks=3, compiles=0):
    """Return (mean seconds of a turn, number of chunks, clean turns) of turns whose prompts have `num_chunks` chunks.

    Each last chunk takes `admission` seconds more, and the chunk number `compiles` 1,000. `is_async`: a turn waits for
    what the turn before dispatched. Otherwise a chunk runs in the turn of its dispatch.
    """
    pending, reads, begin, clean, last = 0.0, 0, clock.now, 0, False
    for turn in range(turns):
        may_read = turn >= late and pace.may_read
        reads += may_read
        extra = may_read * (chunk + (admission if reads % num_chunks == 0 else 0))
        extra += 1000 * may_read * (reads == compiles)
        clock.now += pending + (0 if is_async else extra)
        pending = step + (extra if is_async else 0)
        pace.record(decodes=True, reads=may_read)
        clean += not (may_read or last)
        last = may_read
    return (clock.now - begin) / turns, reads, clean


SETTINGS = [(1.5, 1.0, 1.0), (1.5, 1.0, 4.0), (1.1, 0.01, 0.002), (2.0, 1.0, 9.0)]


@pytest.mark.parametrize("late", [0, 20])  # turns before the first prompt
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("slowdown, step, chunk", SETTINGS)
def test_the_mean_time_between_tokens_stays_within_the_slowdown(slowdown, step, chunk, is_async, late):
    clock, turns = Clock(), 2000
    mean, reads, _ = run(Pace(slowdown, clock), clock, step, chunk, late=late, is_async=is_async)
    assert mean <= step * slowdown * 1.02
    expected = turns * step * (slowdown - 1) / chunk
    assert min(expected, turns) * 0.85 <= reads


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("slowdown, step, chunk", SETTINGS)
def test_the_work_of_an_admission_counts(slowdown, step, chunk, is_async):
    """The median of the chunks does not contain it, because only the last chunk of a prompt has it."""
    clock = Clock()
    mean, reads, _ = run(Pace(slowdown, clock), clock, step, chunk, is_async=is_async, admission=3 * chunk)
    assert mean <= step * slowdown * 1.02
    assert reads >= 0.4 * min(2000 * step * (slowdown - 1) / chunk, 2000)


def test_a_step_alone_is_measured_from_time_to_time():
    """A chunk could be read in each turn. When rows need more time, prompts may need more too."""
    clock = Clock()
    pace = Pace(3.0, clock)
    assert run(pace, clock, 1.0, 0.5)[2] >= 20
    mean, reads, _ = run(pace, clock, 10.0, 15.0)
    assert reads > 1500 and mean <= 30


def test_a_compilation_does_not_stop_reading():
    clock = Clock()
    _, reads, _ = run(Pace(1.5, clock), clock, 1.0, 1.0, turns=200, compiles=20)
    assert reads >= 100 - 2 * LONGEST


def test_prompts_wait_at_a_slowdown_of_1():
    pace = Pace(1.0, Clock())
    pace.record(decodes=True, reads=False)
    assert not pace.may_read
