"""Passes over a subset of the columns of a canvas; the other columns are read from earlier passes.

Caches of full-attention models are built on this module. Each cache plans which columns are computed (*live*), which
are attended to, and which results are stored.
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


class StoredColumns(NamedTuple):
    """Keys and values of all columns from earlier passes."""

    cache: PyTree  # cache of the model, empty
    pending: PyTree  # pending keys and values of N columns


class PassPlan(NamedTuple):
    """The columns of a pass. All fields are bool[B, N] and false past the end of a row."""

    live: Array  # computed columns, which attend to each other's new keys
    visible: Array  # columns that are attended to, including the live ones
    stored: Array  # live columns whose keys and values are stored for later passes


def empty(denoiser: Denoiser, canvas: Canvas) -> StoredColumns:
    """Return an empty cache."""
    cache = denoiser.model.init_cache(denoiser.params, None, len(canvas.tokens), 1)
    shape = jax.eval_shape(lambda: forward_canvas(denoiser, cache, canvas)[1])
    return StoredColumns(cache, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))


def axes(denoiser: Denoiser, memory: StoredColumns) -> StoredColumns:
    """Return the row axis of each array."""
    return StoredColumns(denoiser.model.axes(memory.cache), denoiser.model.axes(memory.pending))


def exists(canvas: Canvas) -> Array:
    """Return bool[B, N]: columns before the end of each row."""
    return jnp.arange(canvas.open.shape[1]) < canvas.end[:, None]


def in_window(canvas: Canvas, window: Window) -> Array:
    """Return bool[B, N]: columns of the window."""
    column = jnp.arange(canvas.open.shape[1])
    return (column >= window.start[:, None]) & (column < window.start[:, None] + window.width)


def first(columns: Array, count: int) -> Array:
    """Return the first `count` of columns bool[B, N]."""
    return columns & (jnp.cumsum(columns, 1) <= count)


def check_refresh(refresh: int | None) -> None:
    """Raise a UsageError for a `refresh` below 1."""
    if refresh is not None and refresh < 1:
        raise UsageError(f"refresh must be at least 1, not {refresh}")


def look(
    denoiser: Denoiser, memory: StoredColumns, canvas: Canvas, window: Window, plan: PassPlan
) -> tuple[WindowOutput, StoredColumns]:
    """Run a pass. Window columns that are not live are not predicted.

    Shifted models also compute the columns before live ones. Live columns are gathered. The width of the pass is the
    smallest compiled width that fits the row with the most live columns. Compiled widths are the window plus one, a
    quarter of the canvas, half of it, and all of it.
    """
    size = canvas.tokens.shape[1]
    live = plan.live & window.active[:, None]
    if denoiser.is_shifted:
        queried = live & canvas.open & in_window(canvas, window)
        live |= jnp.pad(queried[:, 1:], ((0, 0), (0, 1)))
    widths = sorted({min(width, size) for width in (window.width + 1, -(-size // 4), -(-size // 2), size)})
    widths = [width for width in widths if width > min(window.width, size - 1)]
    branch = jnp.searchsorted(jnp.array(widths), jnp.max(jnp.sum(live, 1)))
    window_columns = window.start[:, None] - denoiser.is_shifted + jnp.arange(window.width)
    clipped = jnp.clip(window_columns, 0, size - 1)

    def compute(width: int) -> tuple[Array, PyTree]:
        columns = jnp.argsort(~live, 1, stable=True)[:, :width]
        is_live = take_along(live, columns, 1)
        visible_to_all = jnp.concatenate([plan.visible & ~live, is_live], 1)  # bool[B, N + C]
        itself = jnp.arange(size + width) == size + jnp.arange(width)[:, None]
        tokens = input_tokens(denoiser, canvas, columns)
        hidden, fresh = forward(
            denoiser, memory.cache, tokens, columns, visible_to_all[:, None] | itself, memory.pending
        )
        place = take_along(jnp.cumsum(live, 1) - 1, clipped, 1)
        stored = jnp.where(is_live & take_along(plan.stored, columns, 1), columns, size)
        rows = take_along(hidden, jnp.clip(place, 0, width - 1)[..., None], 1)
        return rows, denoiser.model.insert(memory.pending, fresh, stored)

    with jax.named_scope(scopes.RENEWAL):
        hidden, pending = jax.lax.switch(branch, [functools.partial(compute, width) for width in widths])
    return WindowOutput(
        hidden=hidden,
        predicted=take_along(live, clipped, 1) & (window_columns >= 0) & (window_columns < size),
        columns=jnp.sum(live, 1, dtype=jnp.int32),
        computed=jnp.broadcast_to(jnp.array(widths)[branch], (len(live),)),
    ), StoredColumns(memory.cache, pending)
