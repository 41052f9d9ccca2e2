"""A schedule that follows a time grid from 1 to eps with equal steps.

Ye et al.: Dream 7B: Diffusion Large Language Models (2025), arXiv 2508.15487.

Rule: t_k = 1 - (1 - eps) k / S. Step k takes int(m (1 - t_{k+1} / t_k)) of m masked columns. The last step takes all.
Deviations: steps that would take no column are skipped. They decide no column, so the next pass would read the same
canvas. The remaining passes give the same text.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Canvas, Proposal, Schedule, View
from specjax.errors import UsageError
from specjax.types import Array, PyTree


class State(NamedTuple):
    steps: Array  # int32[B], S, number of steps of this window
    step: Array  # int32[B], k, the next step


@functools.cache
def timesteps(size: int | None = None, *, steps: int | None = None, eps: float = 1e-3) -> Schedule:
    """Return the schedule. size: columns of a window; None: all new ones. steps: S; None: one for each column. eps:
    last time of the grid.

    Raises: UsageError for numbers below 1, or an eps outside [0, 1).
    """
    check_grid(steps, eps)

    def bound(state: State, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, State]:
        left = jnp.sum(view.open, 1, dtype=jnp.int32)
        total = jnp.where(view.entered, left if steps is None else steps, state.steps)
        step = jnp.where(view.entered, 0, state.step)
        first = jnp.ceil(total / (1 - eps) - left).astype(jnp.int32)  # from this step on the share is 1 or more
        step = jnp.minimum(jnp.maximum(step, first), total - 1)
        share = left * (1 - eps) / (total - (1 - eps) * step)  # m (1 - t_{k+1} / t_k)
        quota = jnp.where(step == total - 1, left, share.astype(jnp.int32))
        next_step = jnp.minimum(step + jnp.any(view.eligible, 1), total - 1)
        return view.start + view.columns.shape[1], quota, State(total, next_step)

    return Schedule(size, blocks(size).place, bound, _init)


def check_grid(steps: int | None, eps: float) -> None:
    """Check the settings of the time grid.

    Raises: UsageError for numbers below 1, or an eps outside [0, 1).
    """
    if steps is not None and steps < 1:
        raise UsageError(f"steps must be at least 1, not {steps}")
    if not 0 <= eps < 1:
        raise UsageError(f"eps must be at least 0 and below 1, not {eps}")


def _init(params: PyTree, canvas: Canvas, width: int) -> State:
    nothing = jnp.zeros_like(canvas.start)
    return State(nothing + 1, nothing)
