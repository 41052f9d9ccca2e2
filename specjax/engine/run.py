"""The compiled programs of a job: `start` reads the prompts, `step` goes on by one pass, `run` is the whole loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.arrays.x64 import without_x64
from specjax.engine.carry_over import export_params
from specjax.engine.job import Job, Looped
from specjax.engine.results import DecodeResult
from specjax.engine.statistics import add_stats, zero_stats
from specjax.types import Array, DecodeState, Info


def _begin(job: Job) -> DecodeState:
    """All prompts read, each once; then the rows of its samples are copies of its own."""
    parts, times = job.parts, job.samples
    if times == 1:
        return parts.loop.init(parts, job.tokens, job.lengths, job.keys, job.stop, job.inputs)
    of_prompts = jax.tree.map(lambda x: x[::times] if x.ndim else x, parts.sampling)
    parts = dataclasses.replace(parts, sampling=of_prompts)
    state = parts.loop.init(parts, job.tokens, job.lengths, job.keys[::times], job.stop[::times], job.inputs)
    return batch_axes.repeat_rows(state, times, parts.loop.axes(parts, state))._replace(keys=job.keys)


@jax.jit
@without_x64
def start(job: Job) -> DecodeState:
    """The state from which `step` goes on: prompts read, nothing decoded."""
    return _begin(job)


@functools.partial(jax.jit, donate_argnames=("state",))
@without_x64
def step(parts: Looped, state: DecodeState) -> tuple[DecodeState, Info, Array]:
    """One pass of the target: the next state, in the place of `state`; what was added; whether all rows ended."""
    state, info = parts.loop.step(parts, state)
    return state, info, jnp.all(state.done)


@jax.jit
@without_x64
def run(job: Job) -> DecodeResult:
    """`start` and `step` until all rows have ended, in one program.

    How long the prompts are and how many tokens may follow is data: one program serves all that fit its buffer.

    Returns: DecodeResult whose arrays have as many places as the buffer; `DecodeResult.cut` takes those asked for. Its
      drafter is a `export_params`.
    """
    parts, lengths = job.parts, job.starts
    batch, size = len(job.keys), job.tokens.shape[1]
    state = _begin(job)
    stats = zero_stats(batch, parts.drafter.max_depth, parts.keep.violations)
    logprobs = jnp.zeros((batch, size)) if parts.keep.logprobs else None

    def body(carry):
        before, stats, logprobs = carry
        state, info = parts.loop.step(parts, before)
        if logprobs is not None:
            place = (before.length - lengths)[:, None] + jnp.arange(info.tokens.shape[1])
            place = jnp.where(place < (state.length - lengths)[:, None], place, size)
            logprobs = logprobs.at[jnp.arange(batch)[:, None], place].set(info.logprobs, mode="drop")
        return state, add_stats(stats, info), logprobs

    carry = state, stats, logprobs
    state, stats, logprobs = jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body, carry)
    index = jnp.arange(size)
    new = take_along(state.tokens, jnp.minimum(lengths[:, None] + index, size - 1), 1)
    count = state.length - lengths
    result = DecodeResult(
        jnp.where(index < count[:, None], new, -1),
        count,
        stats.hit_eos,
        stats,
        export_params(parts.drafter, state.draft) if parts.drafter.hooks.export else None,
        logprobs,
        state.finite,
    )
    return parts.loop.result(state, lengths, result)


class Programs(NamedTuple):
    """The two compiled functions that drive a job from Python."""

    start: Callable[[Job], DecodeState]
    step: Callable[[Looped, DecodeState], tuple[DecodeState, Info, Array]]


TRACED = Programs(start, step)
