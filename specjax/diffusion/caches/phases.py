"""The cache of Window-Diffusion: phases of several passes that ignore distant columns and recompute only near ones.

Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching (2026), arXiv
2601.20332.

Rule: a phase starts with a pass over its *buffer*: all decided columns and the first `outer` masked ones. Later columns
are neither computed nor attended to. The other passes of the phase compute the first `inner` masked columns and the
columns that the phase has decided. They read the rest of the buffer from its first pass.
Guarantee: lossy. It is exact with refresh=1 and all masked columns in both windows, or with one layer and all masked
columns in the outer window.
Deviations: a phase also ends if one of the first `inner` masked columns is outside its buffer.
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
    """The current phase."""

    open_at_start: Array  # bool[B, N], columns that were masked when it began
    step: Array  # int32[B], passes of the phase so far


class State(NamedTuple):
    memory: some.StoredColumns
    phase: Phase


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    return State(some.empty(denoiser, canvas), begin(canvas))


def begin(canvas: Canvas) -> Phase:
    """Return the initial phase, before any pass."""
    return Phase(jnp.zeros_like(canvas.open), jnp.zeros_like(canvas.start))


def plan(canvas: Canvas, phase: Phase, outer: int, inner: int, refresh: int) -> tuple[some.PassPlan, Phase]:
    """Return the plan of a pass, and the phase after it."""
    present = some.exists(canvas)
    opened = canvas.open & present
    near = some.first(opened, inner)
    buffer = lambda opened: present & (~opened | some.first(opened, outer))
    due = (phase.step % refresh == 0) | jnp.any(near & ~buffer(phase.open_at_start), 1)
    open_at_start = jnp.where(due[:, None], opened, phase.open_at_start)
    visible = buffer(open_at_start)
    live = visible & (due[:, None] | near | (open_at_start & ~opened))
    return some.PassPlan(live, visible, live), Phase(open_at_start, jnp.where(due, 0, phase.step) + 1)


def _look(
    denoiser: Denoiser, state: State, canvas: Canvas, window: Window, *, outer: int, inner: int, refresh: int
) -> tuple[WindowOutput, State]:
    pass_plan, phase = plan(canvas, state.phase, outer, inner, refresh)
    visible, memory = some.look(denoiser, state.memory, canvas, window, pass_plan)
    active = window.active
    next_phase = Phase(
        jnp.where(active[:, None], phase.open_at_start, state.phase.open_at_start),
        jnp.where(active, phase.step, state.phase.step),
    )
    return visible, State(memory, next_phase)


def _axes(denoiser: Denoiser, state: State) -> State:
    return batch_axes.rows_first(state)._replace(memory=some.axes(denoiser, state.memory))


@functools.cache
def phases(outer: int = 64, inner: int = 16, refresh: int = 32) -> CanvasCache:
    """Build the cache of phases.

    Args:
      outer: masked columns of the buffer. inner: masked columns that every pass computes. refresh: passes of a phase.

    Raises: UsageError for numbers below 1, or an inner window larger than the outer one.
    """
    some.check_refresh(refresh)
    if not 1 <= inner <= outer:
        raise UsageError(f"inner must be from 1 to outer, {outer}, not {inner}")
    look = functools.partial(_look, outer=outer, inner=inner, refresh=refresh)
    return CanvasCache(look, "full", False, _init, "phases", _axes)
