"""Gathers without bounds handling, and the index of the largest entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Array = jax.Array

BLOCK = 64


def take_along(x: Array, index: Array, axis: int) -> Array:
    """Gather like `jnp.take_along_axis`, for an index int32[...] that is known to be in bounds.

    An index out of bounds returns an arbitrary entry. Do not use it to look up the probability of a drafted token: a
    token outside of the vocabulary must have none.

    The default mode of JAX normalises negative and large indices in every call. That was a quarter of the operations of
    a decode program with a tiny model (5,385 against 4,032). With SmolLM2 and `auto` it was a seventh, and compilation
    takes 24 s instead of 31 s without it.
    """
    return jnp.take_along_axis(x, index, axis, mode="promise_in_bounds")


def gather_at(x: Array, *index: ArrayLike) -> Array:
    """Return `x[index]` for indices int32[...] that are known to be in bounds and not negative."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def first_largest(x: Array) -> Array:
    """Return `jnp.argmax(x, -1)` as int32 for x [..., V] without NaN. Ties go to the lowest id.

    On CPU, XLA compares pairs of value and index one by one. A search by blocks takes 0.34 ms instead of
    1.97 ms for 16 rows of 49,152 on two cores. For 64 rows it takes 0.46 ms instead of 7.5 ms.
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
