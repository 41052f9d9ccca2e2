"""Execution of a job step by step from Python, which yields the tokens of each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Protocol

import jax
import jax.numpy as jnp

from specjax.engine.job import Job
from specjax.engine.results import StreamStep
from specjax.engine.run import TRACED, StepPrograms, learned
from specjax.numerics.global_arrays import replicate
from specjax.types import DecodeState, Drafter, Info, Stats


class Recorder(Protocol):
    """A recorder that saves a run for a restart, such as `specjax.persistence.resume.RunCheckpoint`."""

    def resume(self, state: DecodeState) -> tuple[DecodeState, Info | None, Stats | None]:
        """Return the state from which to continue.

        If an earlier run was found, its text, in the form of one step, and its statistics are returned too.
        """
        ...

    def add(self, state: DecodeState, info: Info) -> None:
        """Record one step, before the next step reuses the arrays of `state`."""
        ...

    def finish(self, state: DecodeState) -> None:
        """Record the end of the run."""
        ...


def steps(
    job: Job, recorder: Recorder | None = None, programs: StepPrograms = TRACED
) -> Generator[StreamStep, None, None]:
    """Yield the tokens of each step as soon as they are available.

    The next step is dispatched before the tokens of the previous one are read, so the device does not wait for Python.
    """
    start, step = programs
    state = start(job)
    if recorder is not None:
        state, info, earlier = recorder.resume(state)
        if info is not None:
            yield StreamStep(_to_rows(info.tokens, info.emitted), info.accepted, info, earlier)
    dispatched = None if bool(jnp.all(state.done)) else step(job.parts, state)
    while dispatched is not None:
        state, info, is_last = dispatched
        info, is_last = replicate((info, is_last))  # dispatched before the next step, so that it need not wait for it
        if recorder is not None:
            recorder.add(state, info)
        following = step(job.parts, state)  # speculative: if all rows have ended, this step has no effect
        info, is_last = jax.device_get((info, is_last))
        if recorder is not None and is_last:
            recorder.finish(following[0])
        drafter = _learned_drafter(job, following[0]) if is_last else None
        yield StreamStep(_to_rows(info.tokens, info.emitted), info.accepted, info, drafter=drafter)
        dispatched = None if is_last else following


def _learned_drafter(job: Job, state: DecodeState) -> Callable[[], Drafter] | None:
    """Return a function that computes the drafter with its learned parameters from the final state, or None."""
    drafter = job.parts.drafter
    return functools.partial(learned, drafter, state.draft) if drafter.hooks.export else None


def _to_rows(tokens, count) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(tokens, count, strict=True)]
