"""A window that slides: only the first few open columns may be decided.

Window-Diffusion (2026), arXiv 2601.20332.

Rule: the window begins at the first open column, and its first `count` open columns are eligible; one in each pass is
the share of rules that count.
Deviations: those open columns lie within `width` columns of the first one.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion.schedules.leading import leading
from specjax.diffusion.types import Canvas, Proposal, Schedule, View
from specjax.types import Array, PyTree


@functools.cache
def sliding(count: int, width: int) -> Schedule:
    """Return the schedule. count: open columns that may be decided. width: columns of the window."""

    def bound(state: PyTree, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, PyTree]:
        num_before = jnp.cumsum(view.open, 1) - view.open  # open columns before each
        return view.start + jnp.sum(num_before < count, 1), jnp.ones_like(view.start), state

    return Schedule(width, leading(width).place, bound)
