"""A schedule with a window of the next columns, which starts at the first masked column."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion.types import Canvas, Proposal, Schedule, View
from specjax.types import Array, PyTree


@functools.cache
def leading(width: int) -> Schedule:
    """Return the schedule. width: columns of the window, all of which may be decided."""

    def place(state: PyTree, canvas: Canvas) -> tuple[Array, PyTree]:
        return canvas.first_open, state

    def bound(state: PyTree, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, PyTree]:
        return view.start + width, jnp.ones_like(view.start), state

    return Schedule(width, place, bound)
