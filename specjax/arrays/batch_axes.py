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
    """`batch` with the row of `one`, a batch of one, at `row` int32[], and with what `one` has of what all share."""

    def put(axis: int, many: jax.Array, single: jax.Array) -> jax.Array:
        if axis == SHARED:
            return single
        return jax.lax.dynamic_update_slice_in_dim(many, single.astype(many.dtype), row, axis)

    return jax.tree.map(put, axes, batch, one)


def take_row(batch: Any, row: jax.Array, axes: Any) -> Any:
    """The row at `row` int32[] as a batch of one, and what all rows share."""
    take = lambda axis, x: x if axis == SHARED else jax.lax.dynamic_slice_in_dim(x, row, 1, axis)
    return jax.tree.map(take, axes, batch)


def repeat_rows(batch: Any, times: int, axes: Any) -> Any:
    """Each row `times` times in a row; what all rows share as it is."""
    repeat = lambda axis, x: x if axis == SHARED else jnp.repeat(x, times, axis)
    return jax.tree.map(repeat, axes, batch)


def take_rows(batch: Any, rows: jax.Array, axes: Any) -> Any:
    """The rows at `rows` int32[R], any number of them and some perhaps twice; what all rows share as it is."""
    return jax.tree.map(lambda axis, x: x if axis == SHARED else jnp.take(x, rows, axis), axes, batch)


def where_rows(chosen: jax.Array, batch: Any, others: Any, axes: Any) -> Any:
    """The rows `chosen` bool[B] of one batch, and the others of another, of which is what all rows share, too."""

    def pick(axis: int, x: jax.Array, y: jax.Array) -> jax.Array:
        if axis == SHARED:
            return y
        shape = [1] * x.ndim
        shape[axis] = len(chosen)
        return jnp.where(chosen.reshape(shape), x, y)

    return jax.tree.map(pick, axes, batch, others)


def with_shared(rows: Any, batch: Any, axes: Any) -> Any:
    """`rows` with what all rows of `batch` share in place of their own."""
    return jax.tree.map(lambda axis, own, others: others if axis == SHARED else own, axes, rows, batch)


def widen(pending: Any, slots: int, axis: int = 1) -> Any:
    """Arrays [B, T, ...] with room for `slots` tokens in place of T, zeros behind."""

    def pad(x: jax.Array) -> jax.Array:
        behind = [(0, 0)] * x.ndim
        behind[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, behind)

    return jax.tree.map(pad, pending)


def insert(wide: Any, new: Any, place: Any, axis: int = 1, rows: int = 0) -> Any:
    """Arrays [B, S, ...] with those of T tokens, [B, T, ...], from slot `place` on: int32[] or, per row, int32[B]; or
    each in a slot of its own, int32[B, T], where those at S and above fall away.

    axis, rows: where else their slots and their rows are counted; both from the front or both from the end.
    """
    write = jax.lax.dynamic_update_slice_in_dim
    if jnp.ndim(place) == 0:
        return jax.tree.map(lambda old, new: write(old, new, place, axis), wide, new)
    left = axis - (0 <= rows < axis)  # of a row alone

    def one_row(old: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
        if place.ndim == 0:
            return write(old, new, place, left)
        old, new = jnp.moveaxis(old, left, 0), jnp.moveaxis(new, left, 0)
        return jnp.moveaxis(old.at[place].set(new, mode="drop"), 0, left)

    by_row = jax.vmap(one_row, (rows, rows, 0), rows)
    return jax.tree.map(lambda old, new: by_row(old, new, place), wide, new)
