"""The steps of a job, driven from Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Protocol

import jax
import jax.numpy as jnp

from specjax.engine.carry_over import learned
from specjax.engine.job import Job
from specjax.engine.results import StreamStep
from specjax.engine.run import TRACED, Programs
from specjax.numerics.global_arrays import replicate
from specjax.types import DecodeState, Drafter, Info, Stats


class Record(Protocol):
    """What writes a run down, to go on from after a restart: `specjax.persistence.resume.RunCheckpoint`."""

    def resume(self, state: DecodeState) -> tuple[DecodeState, Info | None, Stats | None]:
        """The state to go on from and, of an earlier run, its text as if one step had added it, and its sums."""
        ...

    def add(self, state: DecodeState, info: Info) -> None:
        """After a step, and before the next one takes the state's place."""
        ...

    def finish(self, state: DecodeState) -> None:
        """After the last step."""
        ...


def steps(job: Job, record: Record | None = None, programs: Programs = TRACED) -> Generator[StreamStep, None, None]:
    """What each step adds, as soon as it is known; the next one is dispatched before its tokens are read."""
    start, step = programs
    state = start(job)
    if record is not None:
        state, info, earlier = record.resume(state)
        if info is not None:
            yield StreamStep(_rows(info.tokens, info.emitted), info.accepted, info, earlier)
    ahead = None if bool(jnp.all(state.done)) else step(job.parts, state)
    while ahead is not None:
        state, info, over = ahead
        info, over = replicate((info, over))  # before the next step, or it would have to wait for that
        if record is not None:
            record.add(state, info)
        # Dispatched on the chance that rows are left: the device need not wait for this host.
        following = step(job.parts, state)
        info, over = jax.device_get((info, over))
        if record is not None and over:
            record.finish(following[0])  # a step of rows that have ended changes nothing
        memory = _memory(job, following[0]) if over else None
        yield StreamStep(_rows(info.tokens, info.emitted), info.accepted, info, drafter=memory)
        ahead = None if over else following


def _memory(job: Job, state: DecodeState) -> Callable[[], Drafter] | None:
    """Of a state whose rows have all ended."""
    drafter = job.parts.drafter
    return functools.partial(learned, drafter, state.draft) if drafter.hooks.export else None


def _rows(tokens, count) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(tokens, count, strict=True)]
