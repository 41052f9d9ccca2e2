"""Passes over some columns of a canvas, of any places: the others are read as an earlier pass left them.

What memories of full attention that compute less than the canvas are made of: each says which columns are computed
(*live*), which are seen, and of which what was computed is kept.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.arrays.indexing import take_along
from specjax.diffusion.forward import forward, forward_canvas, input_tokens
from specjax.diffusion.types import Canvas, Denoiser, Window, WindowOutput
from specjax.errors import UsageError
from specjax.types import Array, PyTree


class Left(NamedTuple):
    """What passes left of all columns."""

    cache: PyTree  # of the model, empty
    pending: PyTree  # keys and values of N columns


class Plan(NamedTuple):
    """What a pass does. All bool[B, N]; columns that do not exist are in none of them."""

    live: Array  # columns that are computed; what they give now is what all see of them
    seen: Array  # columns that are seen at all, the live ones among them
    kept: Array  # live ones whose keys and values passes to come shall read


def nothing(denoiser: Denoiser, canvas: Canvas) -> Left:
    """What no pass has left anything in."""
    cache = denoiser.model.init_cache(denoiser.params, None, len(canvas.tokens), 1)
    shape = jax.eval_shape(lambda: forward_canvas(denoiser, cache, canvas)[1])
    return Left(cache, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))


def axes(denoiser: Denoiser, left: Left) -> Left:
    """The place of the rows in the shape of each array."""
    return Left(denoiser.model.axes(left.cache), denoiser.model.axes(left.pending))


def exists(canvas: Canvas) -> Array:
    """bool[B, N]."""
    return jnp.arange(canvas.open.shape[1]) < canvas.end[:, None]


def within(canvas: Canvas, window: Window) -> Array:
    """bool[B, N]: columns of the window."""
    column = jnp.arange(canvas.open.shape[1])
    return (column >= window.start[:, None]) & (column < window.start[:, None] + window.width)


def first(columns: Array, count: int) -> Array:
    """bool[B, N]: the first `count` of columns bool[B, N]."""
    return columns & (jnp.cumsum(columns, 1) <= count)


def check_refresh(refresh: int | None) -> None:
    """Raises: UsageError for less than one pass."""
    if refresh is not None and refresh < 1:
        raise UsageError(f"refresh must be at least 1, not {refresh}")


def look(denoiser: Denoiser, left: Left, canvas: Canvas, window: Window, plan: Plan) -> tuple[WindowOutput, Left]:
    """The pass. Columns of the window that are not live are not predicted; of shifted models the columns before those
    that are live are computed, too.

    Live columns are gathered. The pass is as wide as the row that has most of them needs, out of a few widths, each of
    which is compiled: one that the window fits into, a quarter and half of the canvas, and all of it.
    """
    size = canvas.tokens.shape[1]
    live = plan.live & window.active[:, None]
    if denoiser.is_shifted:
        asked = live & canvas.open & within(canvas, window)
        live |= jnp.pad(asked[:, 1:], ((0, 0), (0, 1)))
    widths = sorted({min(width, size) for width in (window.width + 1, -(-size // 4), -(-size // 2), size)})
    widths = [width for width in widths if width > min(window.width, size - 1)]
    branch = jnp.searchsorted(jnp.array(widths), jnp.max(jnp.sum(live, 1)))
    wanted = window.start[:, None] - denoiser.is_shifted + jnp.arange(window.width)
    inside = jnp.clip(wanted, 0, size - 1)

    def compute(width: int) -> tuple[Array, PyTree]:
        columns = jnp.argsort(~live, 1, stable=True)[:, :width]
        real = take_along(live, columns, 1)
        sees = jnp.concatenate([plan.seen & ~live, real], 1)  # bool[B, N + C]
        itself = jnp.arange(size + width) == size + jnp.arange(width)[:, None]
        tokens = input_tokens(denoiser, canvas, columns)
        hidden, fresh = forward(denoiser, left.cache, tokens, columns, sees[:, None] | itself, left.pending)
        place = take_along(jnp.cumsum(live, 1) - 1, inside, 1)
        kept = jnp.where(real & take_along(plan.kept, columns, 1), columns, size)
        chosen = take_along(hidden, jnp.clip(place, 0, width - 1)[..., None], 1)
        return chosen, denoiser.model.insert(left.pending, fresh, kept)

    with jax.named_scope(scopes.RENEWAL):
        hidden, pending = jax.lax.switch(branch, [functools.partial(compute, width) for width in widths])
    return WindowOutput(
        hidden=hidden,
        predicted=take_along(live, inside, 1) & (wanted >= 0) & (wanted < size),
        columns=jnp.minimum(jnp.array(widths)[branch], canvas.end),
    ), Left(left.cache, pending)
