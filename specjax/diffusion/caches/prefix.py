"""The prefix cache of models with full attention: what is before the window stays as it was on entering it.

Wu et al.: Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025),
arXiv 2505.22618.

Rule: a pass over the whole canvas on entering a window, whose logits decide its first columns, leaves the keys and
values of the columns before it. Later passes compute the window and all columns behind it.
Guarantee: lossy; exact with one layer, or if refreshed in every pass.
Deviations: the pass is as wide as a quarter, half or all of the canvas, whichever the columns fit into.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion.caches import some
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.types import Array


def plan(canvas: Canvas, window: Window, due: Array) -> some.Plan:
    """due: bool[B], rows of which all is computed."""
    there = some.exists(canvas)
    live = there & (due[:, None] | (jnp.arange(there.shape[1]) >= window.start[:, None]))
    return some.Plan(live, there, live)


def _look(
    denoiser: Denoiser, left: some.Left, canvas: Canvas, window: Window, *, refresh: int | None
) -> tuple[WindowOutput, some.Left]:
    due = window.entered if refresh is None else window.entered | (canvas.passes % refresh == 0)
    return some.look(denoiser, left, canvas, window, plan(canvas, window, due))


@functools.cache
def prefix(refresh: int | None = None) -> CanvasCache:
    """refresh: passes after which the whole canvas is computed again; None: only on entering a window.

    Raises: UsageError for less than one.
    """
    some.check_refresh(refresh)
    init = lambda denoiser, canvas, width: some.nothing(denoiser, canvas)
    return CanvasCache(functools.partial(_look, refresh=refresh), "full", False, init, "prefix", some.axes)
