"""A schedule with a sliding window, in which only the first few masked columns may be decided.

Window-Diffusion (2026), arXiv 2601.20332.

Rule: the window starts at the first masked column, and its first `count` masked columns are eligible. The quota is one
column per pass.
Deviations: the eligible columns lie within `width` columns of the first one.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion.schedules.leading import leading
from specjax.diffusion.types import Canvas, Proposal, Schedule, View
from specjax.types import Array, PyTree


@functools.cache
def sliding(count: int, width: int) -> Schedule:
    """Return the schedule. count: masked columns that may be decided. width: columns of the window."""

    def bound(state: PyTree, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, PyTree]:
        num_before = jnp.cumsum(view.open, 1) - view.open  # masked columns before each column
        return view.start + jnp.sum(num_before < count, 1), jnp.ones_like(view.start), state

    return Schedule(width, leading(width).place, bound)
