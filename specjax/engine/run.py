"""Compiled programs of a job: `start` prefills the prompts, `step` is one step, and `run` is the complete loop.

This file also passes learned drafter parameters from one call, or one request, to the next. A program copies every
array that it returns unchanged, such as a corpus or a draft model. So programs return a marker for each parameter that
did not change, and the host replaces the marker by the original array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.engine.job import Job, LoopParts
from specjax.engine.results import DecodeResult, add_stats, zero_stats
from specjax.numerics.text_identity import text_identity
from specjax.types import STATIC, Array, Context, DecodeState, Drafter, Info, PyTree, Target


def _prefill_rows(job: Job) -> DecodeState:
    """Prefill each prompt once, and copy its row for each of its samples. Rows that are not usable have ended."""
    parts, samples = job.parts, job.samples
    if job.usable is not None:
        usable = job.usable if samples == 1 else jnp.repeat(job.usable, samples)
        state = _prefill_rows(dataclasses.replace(job, usable=None))
        return state._replace(done=state.done | ~usable, finite=state.finite & usable)
    if samples == 1:
        return parts.loop.init(parts, job.tokens, job.lengths, job.keys, job.stop, job.inputs)
    per_prompt = jax.tree.map(lambda x: x[::samples] if x.ndim else x, parts.sampling)
    parts = dataclasses.replace(parts, sampling=per_prompt)
    state = parts.loop.init(parts, job.tokens, job.lengths, job.keys[::samples], job.stop[::samples], job.inputs)
    return batch_axes.repeat_rows(state, samples, parts.loop.axes(parts, state))._replace(keys=job.keys)


@jax.jit
@with_standard_modes
def start(job: Job) -> DecodeState:
    """Prefill the prompts. Return the state before the first step."""
    return _prefill_rows(job)


@functools.partial(jax.jit, donate_argnames=("state",))
@with_standard_modes
def step(parts: LoopParts, state: DecodeState) -> tuple[DecodeState, Info, Array]:
    """Run one step and return the next state, its diagnostics, and bool[], True if all rows have ended.

    `state` is donated: its arrays are reused for the next state.
    """
    state, info = parts.loop.step(parts, state)
    return state, info, jnp.all(state.done)


@jax.jit
@with_standard_modes
def run(job: Job) -> DecodeResult:
    """Run `start`, then `step` until all rows have ended, in one program.

    Prompt lengths and the number of new tokens are data, so one program serves all jobs that fit its buffer.

    Returns: DecodeResult with arrays as wide as the token buffer; `DecodeResult.cut` trims them. Its drafter has the
      form of `export_params`.
    """
    parts, lengths = job.parts, job.starts
    batch, size = len(job.keys), job.tokens.shape[1]
    state = _prefill_rows(job)
    stats = zero_stats(batch, parts.drafter.max_depth, parts.keep.violations)
    logprobs = jnp.zeros((batch, size)) if parts.keep.logprobs else None

    def body(carry):
        previous, stats, logprobs = carry
        state, info = parts.loop.step(parts, previous)
        if logprobs is not None:
            place = (previous.length - lengths)[:, None] + jnp.arange(info.tokens.shape[1])
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
        text_identity(parts.target),
    )
    return parts.loop.result(state, lengths, result)


class StepPrograms(NamedTuple):
    """The two compiled functions that drive a job from Python."""

    start: Callable[[Job], DecodeState]
    step: Callable[[LoopParts, DecodeState], tuple[DecodeState, Info, Array]]


TRACED = StepPrograms(start, step)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Unchanged:
    """A marker for a drafter parameter that a program did not change."""

    number: int = field(metadata=STATIC)  # index among the leaves of the drafter's parameters


def export_params(drafter: Drafter, draft: PyTree) -> Drafter:
    """Return the drafter with the parameters that its state `draft` exports, within a program.

    Unchanged parameters are replaced by markers. `restore_params` reverses this on the host.
    """
    params = drafter.params if drafter.hooks.export is None else drafter.hooks.export(drafter.params, draft)
    number = {id(x): n for n, x in enumerate(jax.tree.leaves(drafter.params))}
    mark = lambda x: _Unchanged(number[id(x)]) if id(x) in number else x
    return drafter.replace(params=jax.tree.map(mark, params))


def restore_params(drafter: Drafter, exported: PyTree) -> PyTree:
    """Replace the markers in a result of `export_params` by the parameters of `drafter`. None stays None."""
    leaves = jax.tree.leaves(drafter.params)
    is_mark = lambda x: isinstance(x, _Unchanged)
    return jax.tree.map(lambda x: leaves[x.number] if is_mark(x) else x, exported, is_leaf=is_mark)


def learned(drafter: Drafter, draft: PyTree) -> Drafter:
    """Return the drafter with the parameters that its state `draft` exports, on the host."""
    return restore_params(drafter, _export_params(drafter, draft))


def canonical(target: Target, drafter: Drafter) -> Drafter:
    """Return the drafter with parameters in the form that `Hooks.export` returns, with unchanged meaning.

    Then the first call and all calls that continue from its result run the same program.
    """
    return restore_params(drafter, _export_blank(target, drafter))


_export_params = jax.jit(with_standard_modes(export_params))


@jax.jit
@with_standard_modes
def _export_blank(target: Target, drafter: Drafter) -> Drafter:
    context = Context(jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), target=target)
    return export_params(drafter, drafter.init(drafter.params, context))
