"""A schedule of blocks from left to right, each decided in a fixed number of passes.

Nie et al.: Large Language Diffusion Models (LLaDA, 2025), arXiv 2502.09992; sub-blocks: Wu et al.: Fast-dLLM v2 (2025),
arXiv 2509.26328.

Rule: the window is the block of the first masked column. A block with m masked columns on entry is decided in S passes.
Each pass takes floor(m / S) columns, and the first m mod S passes take one more. With sub-blocks, only the first
sub-block with a masked column may be decided. SDAR computes the quotas of all blocks from the length of a block, also
for a first block that the prompt has partly filled (`from_length`).
Deviations: the last block may be shorter than the others, and the number of passes need not divide the block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.diffusion.types import Canvas, Proposal, Schedule, View
from specjax.errors import UsageError
from specjax.types import Array, PyTree


class State(NamedTuple):
    masks: Array  # int32[B], masked columns of the block when it was entered
    taken: Array  # int32[B], passes over the block that had an eligible column


@functools.cache
def blocks(
    size: int | None = None, *, steps: int | None = None, sub_block: int | None = None, from_length: bool = False
) -> Schedule:
    """Return the schedule.

    Args:
      size: columns of a block; None: one block of all new columns. sub_block: columns of a sub-block; None: none.
      steps: passes for a block; None: one for each column.
      from_length: compute quotas from `size`, not from the columns that are masked on entry.

    Raises: UsageError for numbers below 1, or sub-blocks that do not divide the block.
    """
    for name, value in (("block", size), ("steps", steps), ("sub_block", sub_block)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    if sub_block is not None and (size is None or size % sub_block):
        raise UsageError(f"a sub_block of {sub_block} does not divide the block of {size or 'all new columns'}")

    def place(state: State, canvas: Canvas) -> tuple[Array, State]:
        if size is None:
            return canvas.start, state
        return canvas.origin + (canvas.first_open - canvas.origin) // size * size, state

    def bound(state: State, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, State]:
        columns = size if from_length and size else jnp.sum(view.open, 1, dtype=jnp.int32)
        masks = jnp.where(view.entered, columns, state.masks)
        taken = jnp.where(view.entered, 0, state.taken)
        quota = jnp.ones_like(masks) if steps is None else masks // steps + (taken < masks % steps)
        end = view.start + view.columns.shape[1]
        if sub_block is not None:
            end = view.start + ((canvas.first_open - view.start) // sub_block + 1) * sub_block
        return end, quota, State(masks, taken + jnp.any(view.eligible, 1))

    return Schedule(size, place, bound, _init)


def _init(params: PyTree, canvas: Canvas, width: int) -> State:
    nothing = jnp.zeros_like(canvas.start)
    return State(nothing, nothing)


def num_passes(canvas: Canvas, size: int | None, steps: int | None) -> Array:
    """Return int32[B]: number of passes for all new columns in blocks of `size` with `steps` passes each."""
    start, end = canvas.start - canvas.origin, canvas.end - canvas.origin
    of_block = lambda masks: masks if steps is None else jnp.minimum(masks, steps)
    if size is None:
        return of_block(end - start)
    first, last = start // size, (end - 1) // size
    middle = jnp.maximum(last - first - 1, 0) * (size if steps is None else min(size, steps))
    head = of_block(jnp.minimum((first + 1) * size, end) - start)
    return head + middle + jnp.where(last > first, of_block(end - last * size), 0)
