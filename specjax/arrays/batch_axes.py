"""Operations on pytrees of arrays in which one axis of each array counts the rows of a batch.

An `axes` argument has the structure of the pytree and gives the row axis of each array, or `SHARED`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

SHARED = -1
"""Row axis of an array that all rows share."""


def rows_first(tree: Any) -> Any:
    """Return axis 0 for every array: the first axis counts the rows."""
    return jax.tree.map(lambda x: 0, tree)


def shared(tree: Any) -> Any:
    """Return `SHARED` for every array."""
    return jax.tree.map(lambda x: SHARED, tree)


def put_row(batch: Any, one: Any, row: jax.Array, axes: Any) -> Any:
    """Return `batch` with one row replaced by the only row of `one`. Shared arrays are taken from `one`.

    Args:
      one: the same pytree for a batch of one row. row: int32[].
    """

    def put(axis: int, many: jax.Array, single: jax.Array) -> jax.Array:
        if axis == SHARED:
            return single
        return jax.lax.dynamic_update_slice_in_dim(many, single.astype(many.dtype), row, axis)

    return jax.tree.map(put, axes, batch, one)


def take_row(batch: Any, row: jax.Array, axes: Any) -> Any:
    """Return one row as a batch of one, with the shared arrays unchanged. `row` is int32[]."""
    take = lambda axis, x: x if axis == SHARED else jax.lax.dynamic_slice_in_dim(x, row, 1, axis)
    return jax.tree.map(take, axes, batch)


def repeat_rows(batch: Any, times: int, axes: Any) -> Any:
    """Repeat each row `times` times in succession. Shared arrays stay unchanged."""
    repeat = lambda axis, x: x if axis == SHARED else jnp.repeat(x, times, axis)
    return jax.tree.map(repeat, axes, batch)


def take_rows(batch: Any, rows: jax.Array, axes: Any) -> Any:
    """Gather the rows at indices `rows` int32[R], repetitions allowed. Shared arrays stay unchanged."""
    return jax.tree.map(lambda axis, x: x if axis == SHARED else jnp.take(x, rows, axis), axes, batch)


def where_rows(mask: jax.Array, batch: Any, alternative: Any, axes: Any) -> Any:
    """Select rows of `batch` where `mask` bool[B] is true, else of `alternative`.

    Shared arrays are taken from `alternative`.
    """

    def pick(axis: int, x: jax.Array, y: jax.Array) -> jax.Array:
        if axis == SHARED:
            return y
        shape = [1] * x.ndim
        shape[axis] = len(mask)
        return jnp.where(mask.reshape(shape), x, y)

    return jax.tree.map(pick, axes, batch, alternative)


def with_shared(rows: Any, batch: Any, axes: Any) -> Any:
    """Return `rows` with its shared arrays replaced by those of `batch`."""
    return jax.tree.map(lambda axis, own, common: common if axis == SHARED else own, axes, rows, batch)


def widen(pending: Any, slots: int, axis: int = 1) -> Any:
    """Pad arrays [B, T, ...] with zeros to `slots` tokens along `axis`."""

    def pad(x: jax.Array) -> jax.Array:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, padding)

    return jax.tree.map(pad, pending)


def insert(wide: Any, new: Any, place: Any, axis: int = 1, rows: int = 0) -> Any:
    """Write the tokens of `new` [B, T, ...] into the slots of `wide` [B, S, ...].

    Args:
      place: the first slot, int32[] or per row int32[B]; or one slot per token, int32[B, T]. In the last form, tokens
        with a slot of at least S are dropped.
      axis, rows: the axes of slots and of rows. Both count from the front or both from the end.
    """
    write = jax.lax.dynamic_update_slice_in_dim
    if jnp.ndim(place) == 0:
        return jax.tree.map(lambda old, new: write(old, new, place, axis), wide, new)
    slot_axis = axis - (0 <= rows < axis)  # the slot axis of a single row

    def one_row(old: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
        if place.ndim == 0:
            return write(old, new, place, slot_axis)
        old, new = jnp.moveaxis(old, slot_axis, 0), jnp.moveaxis(new, slot_axis, 0)
        return jnp.moveaxis(old.at[place].set(new, mode="drop"), 0, slot_axis)

    by_row = jax.vmap(one_row, (rows, rows, 0), rows)
    return jax.tree.map(lambda old, new: by_row(old, new, place), wide, new)
