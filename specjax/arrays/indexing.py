"""Entries of arrays by index, and the index of the largest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Array = jax.Array

BLOCK = 64


def take_along(x: Array, index: Array, axis: int) -> Array:
    """`jnp.take_along_axis` for an index int32[...] within the axis; outside of it, some entry. Not for rules that
    look up a drafted token's probability: one that is not in the vocabulary must find none.

    It looks for indices below zero or behind the end, over and over: a quarter of the operations of a decode program
    with a tiny model (5,385 against 4,032), a seventh with SmolLM2 and `auto`, which compiles in 24 s instead of 31.
    """
    return jnp.take_along_axis(x, index, axis, mode="promise_in_bounds")


def at(x: Array, *index: ArrayLike) -> Array:
    """`x[index]` for indices int32[...] within the axes, as `take_along` has it."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def first_largest(x: Array) -> Array:
    """`jnp.argmax(x, -1)` as int32, for x [..., V] over a vocabulary, without NaN: of equal entries the lowest id.

    On CPU XLA compares pairs of value and index one by one. Finding the block with the largest value, then its place
    there, takes 0.34 ms instead of 1.97 for 16 rows of 49,152 on two cores, 0.46 instead of 7.5 for 64.
    """
    plain = lambda x: jnp.argmax(x, -1).astype(jnp.int32)
    vocab = x.shape[-1]
    if vocab % BLOCK or vocab < 64 * BLOCK:
        return plain(x)

    def by_blocks(x):
        blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
        block = plain(jnp.max(blocks, -1))
        return block * BLOCK + plain(take_along(blocks, block[..., None, None], -2)[..., 0, :])

    return jax.lax.platform_dependent(x, cpu=by_blocks, default=plain)
