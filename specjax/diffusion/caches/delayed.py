"""The delayed cache: a column's keys and values are kept one pass after it was decided, computed from its token.

Ma et al.: dKV-Cache: The Cache for Diffusion Language Models (2025), arXiv 2505.15781, `decode`.

Rule: the first two passes over a window, and every `refresh`-th, compute the whole canvas. The others compute the open
columns and those that the pass before decided; of the latter they keep what they compute. All else is read as it was
left: a column moves most in the pass that first reads it as a token.
Guarantee: lossy; exact with one layer, or with refresh=1.
Deviations: whether a column is computed is told by its token: it is if what it left came of another one. Of a rule that
decides without revising that is the pass after it was decided, and one that revises is right, too. By default open
columns behind the window stay as they were left (`suffix="frozen"`), so that a pass computes about as many columns as
the window has; "fresh" computes them as the paper does. Its greedy variant, for orders that are known beforehand, is
not here.
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
    left: some.Left
    of: Array  # int32[B, N], the token that it came of; -1: nothing was left
    step: Array  # int32[B], passes over this window


def _init(denoiser: Denoiser, canvas: Canvas, width: int) -> State:
    return State(some.nothing(denoiser, canvas), jnp.full_like(canvas.tokens, -1), jnp.zeros_like(canvas.start))


def plan(
    canvas: Canvas, window: Window, tokens: Array, of: Array, step: Array, refresh: int | None, suffix: Suffix
) -> some.Plan:
    """tokens: int32[B, N], what all columns are shown as. step: int32[B], this pass over the window, from 0."""
    due = step < 2 if refresh is None else (step < 2) | (step % refresh == 0)
    changed = tokens != of
    moving = canvas.open if suffix == "fresh" else canvas.open & some.within(canvas, window)
    there = some.exists(canvas)
    return some.Plan(there & (due[:, None] | moving | changed), there, there & (due[:, None] | changed))


def _look(
    denoiser: Denoiser, state: State, canvas: Canvas, window: Window, *, refresh: int | None, suffix: Suffix
) -> tuple[WindowOutput, State]:
    tokens = input_tokens(denoiser, canvas, jnp.broadcast_to(jnp.arange(canvas.tokens.shape[1]), canvas.tokens.shape))
    step = jnp.where(window.entered, 0, state.step)
    planned = plan(canvas, window, tokens, state.of, step, refresh, suffix)
    seen, left = some.look(denoiser, state.left, canvas, window, planned)
    of = jnp.where(planned.kept & window.active[:, None], tokens, state.of)
    return seen, State(left, of, step + window.active)


def _axes(denoiser: Denoiser, state: State) -> State:
    return batch_axes.rows_first(state)._replace(left=some.axes(denoiser, state.left))


@functools.cache
def delayed(refresh: int | None = 8, suffix: Suffix = "frozen") -> CanvasCache:
    """refresh: passes over a window after which the whole canvas is computed again; None: never. suffix: what open
    columns behind the window are.

    Raises: UsageError for less than one pass, or another word.
    """
    some.check_refresh(refresh)
    if suffix not in ("frozen", "fresh"):
        raise UsageError(f'suffix must be frozen or fresh, not "{suffix}"')
    look = functools.partial(_look, refresh=refresh, suffix=suffix)
    return CanvasCache(look, "full", False, _init, "delayed", _axes)
