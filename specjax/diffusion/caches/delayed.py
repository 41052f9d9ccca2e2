"""The delayed cache: a column's keys and values are stored one pass after its decision, when they come from its token.

Ma et al.: dKV-Cache: The Cache for Diffusion Language Models (2025), arXiv 2505.15781, `decode`.

Rule: the first two passes over a window, and every `refresh`-th, compute the whole canvas. The other passes compute the
masked columns and the columns that the previous pass decided, and store the latter. All other columns are read from the
cache. The delay helps because a column changes most in the pass that first reads its token.
Guarantee: lossy; exact with one layer, or with refresh=1.
Deviations: a column is computed if its stored keys came from another token. Without revisions this is the pass after
the decision; it is also correct for a rule that revises. By default the masked columns after the window stay as they
were stored (`suffix="frozen"`). A pass then computes about as many columns as the window has. "fresh" computes them as
the paper does. The paper's greedy variant for known orders is not implemented.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.diffusion.caches import some
from specjax.diffusion.forward import input_tokens
from specjax.diffusion.types import Canvas, CanvasCache, Denoiser, Window, WindowOutput
from specjax.errors import UsageError
from specjax.types import Array

Suffix = Literal["frozen", "fresh"]


class State(NamedTuple):
    memory: some.StoredColumns
    source: Array  # int32[B, N], token that the stored keys came from; -1: none
    step: Array  # int32[B], passes over this window


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    return State(some.empty(denoiser, canvas), jnp.full_like(canvas.tokens, -1), jnp.zeros_like(canvas.start))


def plan(
    canvas: Canvas, window: Window, tokens: Array, source: Array, step: Array, refresh: int | None, suffix: Suffix
) -> some.PassPlan:
    """Plan a pass.

    Args:
      tokens: int32[B, N], input tokens of all columns. source: int32[B, N], tokens that the stored keys came from.
      step: int32[B], index of this pass over the window, from 0.
    """
    due = step < 2 if refresh is None else (step < 2) | (step % refresh == 0)
    changed = tokens != source
    moving = canvas.open if suffix == "fresh" else canvas.open & some.in_window(canvas, window)
    present = some.exists(canvas)
    return some.PassPlan(present & (due[:, None] | moving | changed), present, present & (due[:, None] | changed))


def _look(
    denoiser: Denoiser, state: State, canvas: Canvas, window: Window, *, refresh: int | None, suffix: Suffix
) -> tuple[WindowOutput, State]:
    tokens = input_tokens(denoiser, canvas, jnp.broadcast_to(jnp.arange(canvas.tokens.shape[1]), canvas.tokens.shape))
    step = jnp.where(window.entered, 0, state.step)
    pass_plan = plan(canvas, window, tokens, state.source, step, refresh, suffix)
    output, memory = some.look(denoiser, state.memory, canvas, window, pass_plan)
    source = jnp.where(pass_plan.stored & window.active[:, None], tokens, state.source)
    return output, State(memory, source, step + window.active)


def _axes(denoiser: Denoiser, state: State) -> State:
    return batch_axes.rows_first(state)._replace(memory=some.axes(denoiser, state.memory))


@functools.cache
def delayed(refresh: int | None = 8, suffix: Suffix = "frozen") -> CanvasCache:
    """Build the delayed cache.

    Args:
      refresh: passes over a window after which the whole canvas is computed again; None: never.
      suffix: "frozen" or "fresh", the treatment of masked columns after the window.

    Raises: UsageError for a `refresh` below 1, or another suffix.
    """
    some.check_refresh(refresh)
    if suffix not in ("frozen", "fresh"):
        raise UsageError(f'suffix must be frozen or fresh, not "{suffix}"')
    look = functools.partial(_look, refresh=refresh, suffix=suffix)
    return CanvasCache(look, "full", False, _init, "delayed", _axes)
