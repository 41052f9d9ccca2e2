"""Arrays that hold something for each row of a batch, and buffers that hold it for each of several tokens too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

SHARED = -1
"""In place of the axis of the rows: all rows share this array."""


def rows_first(tree: Any) -> Any:
    """0 for each array: its first axis counts the rows."""
    return jax.tree.map(lambda x: 0, tree)


def shared(tree: Any) -> Any:
    """SHARED for each array."""
    return jax.tree.map(lambda x: SHARED, tree)


def put_row(batch: Any, one: Any, row: jax.Array, axes: Any) -> Any:
    """`batch` with the row of `one`, a batch of one, at `row` int32[]; what all rows share stays."""

    def put(axis: int, many: jax.Array, single: jax.Array) -> jax.Array:
        if axis == SHARED:
            return many
        return jax.lax.dynamic_update_slice_in_dim(many, single.astype(many.dtype), row, axis)

    return jax.tree.map(put, axes, batch, one)


def widen(pending: Any, slots: int, axis: int = 1) -> Any:
    """Arrays [B, T, ...] with room for `slots` tokens in place of T, zeros behind."""

    def pad(x: jax.Array) -> jax.Array:
        behind = [(0, 0)] * x.ndim
        behind[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, behind)

    return jax.tree.map(pad, pending)


def insert(wide: Any, new: Any, place: Any, axis: int = 1, rows: int = 0) -> Any:
    """Arrays [B, S, ...] with those of T tokens, [B, T, ...], from slot `place` on: int32[] or, per row, int32[B].

    axis, rows: where else their slots and their rows are counted; both from the front or both from the end.
    """
    write = jax.lax.dynamic_update_slice_in_dim
    if jnp.ndim(place) == 0:
        return jax.tree.map(lambda old, new: write(old, new, place, axis), wide, new)
    left = axis - (0 <= rows < axis)  # of a row alone
    by_row = jax.vmap(lambda old, new, place: write(old, new, place, left), (rows, rows, 0), rows)
    return jax.tree.map(lambda old, new: by_row(old, new, place), wide, new)
