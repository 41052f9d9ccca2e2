"""Phases of several passes in which far columns are not seen, and near ones are computed only where text is written.

Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching (2026), arXiv
2601.20332.

Rule: a phase begins with a pass over its *buffer*: all columns that are decided and the first `outer` open ones; what
is behind them is neither computed nor seen. The other passes of the phase compute the first `inner` open columns and
those that the phase has decided, and read the rest of the buffer as its first pass left it.
Guarantee: lossy; exact with refresh=1 and all open columns in both windows; in one layer with all of them in `outer`.
Deviations: a phase also ends where one of the first `inner` open columns is outside of its buffer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.diffusion.caches import some
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.errors import UsageError
from specjax.types import Array


class Phase(NamedTuple):
    """Where a phase is."""

    opened: Array  # bool[B, N], columns that were open when it began
    step: Array  # int32[B], passes since then


class State(NamedTuple):
    left: some.Left
    phase: Phase


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    return State(some.nothing(denoiser, canvas), begin(canvas))


def begin(canvas: Canvas) -> Phase:
    """Before any pass."""
    return Phase(jnp.zeros_like(canvas.open), jnp.zeros_like(canvas.start))


def plan(canvas: Canvas, phase: Phase, outer: int, inner: int, refresh: int) -> tuple[some.Plan, Phase]:
    """What a pass does, and the phase that it is in, itself counted."""
    there = some.exists(canvas)
    opened = canvas.open & there
    near = some.first(opened, inner)
    buffer = lambda opened: there & (~opened | some.first(opened, outer))
    due = (phase.step % refresh == 0) | jnp.any(near & ~buffer(phase.opened), 1)
    began = jnp.where(due[:, None], opened, phase.opened)
    seen = buffer(began)
    live = seen & (due[:, None] | near | (began & ~opened))
    return some.Plan(live, seen, live), Phase(began, jnp.where(due, 0, phase.step) + 1)


def _look(
    denoiser: Denoiser, state: State, canvas: Canvas, window: Window, *, outer: int, inner: int, refresh: int
) -> tuple[WindowOutput, State]:
    planned, phase = plan(canvas, state.phase, outer, inner, refresh)
    seen, left = some.look(denoiser, state.left, canvas, window, planned)
    active = window.active
    kept = Phase(
        jnp.where(active[:, None], phase.opened, state.phase.opened), jnp.where(active, phase.step, state.phase.step)
    )
    return seen, State(left, kept)


def _axes(denoiser: Denoiser, state: State) -> State:
    return batch_axes.rows_first(state)._replace(left=some.axes(denoiser, state.left))


@functools.cache
def phases(outer: int = 64, inner: int = 16, refresh: int = 32) -> CanvasCache:
    """outer: open columns of the buffer. inner: those of them that every pass computes. refresh: passes of a phase.

    Raises: UsageError for numbers below 1, or an inner window that is the larger one.
    """
    some.check_refresh(refresh)
    if not 1 <= inner <= outer:
        raise UsageError(f"the inner window must have from 1 to {outer} columns, those of the outer one, not {inner}")
    look = functools.partial(_look, outer=outer, inner=inner, refresh=refresh)
    return CanvasCache(look, "full", False, _init, "phases", _axes)
