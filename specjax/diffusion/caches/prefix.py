"""The prefix cache of models with full attention: columns before the window stay fixed after it is entered.

Wu et al.: Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025),
arXiv 2505.22618.

Rule: on entry to a window, a pass over the whole canvas decides its first columns. It also stores the keys and values
of the columns before the window. Later passes compute the window and all columns after it.
Guarantee: lossy; exact with one layer, or if refreshed in every pass.
Deviations: a pass is as wide as the window, a quarter, half or all of the canvas: the smallest that fits its columns.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion.caches import some
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.types import Array


def plan(canvas: Canvas, window: Window, due: Array) -> some.PassPlan:
    """Return the plan of a pass. `due` bool[B] marks rows that compute all columns."""
    present = some.exists(canvas)
    live = present & (due[:, None] | (jnp.arange(present.shape[1]) >= window.start[:, None]))
    return some.PassPlan(live, present, live)


def _look(
    denoiser: Denoiser, memory: some.StoredColumns, canvas: Canvas, window: Window, *, refresh: int | None
) -> tuple[WindowOutput, some.StoredColumns]:
    due = window.entered if refresh is None else window.entered | (canvas.passes % refresh == 0)
    return some.look(denoiser, memory, canvas, window, plan(canvas, window, due))


@functools.cache
def prefix(refresh: int | None = None) -> CanvasCache:
    """Build the prefix cache.

    Args:
      refresh: passes after which the whole canvas is computed again; None: only on entry to a window.

    Raises: UsageError for a `refresh` below 1.
    """
    some.check_refresh(refresh)
    init = lambda denoiser, canvas, width: some.empty(denoiser, canvas)
    return CanvasCache(functools.partial(_look, refresh=refresh), "full", False, init, "prefix", some.axes)
