"""How far the end of a text recurs within it: one vectorised compare, no automaton."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import Array


def match_length(tokens: Array, length: Array, longest: int) -> Array:
    """int32[B, L]: how many tokens ending at i equal the end of the text, at most `longest`; 0 at the end itself.

    `longest` times L integer compares: nothing beside a pass of a model.
    """
    position = jnp.arange(tokens.shape[1])
    running = position < length[:, None] - 1
    total = jnp.zeros(tokens.shape, jnp.int32)
    for j in range(longest):
        last = jnp.take_along_axis(tokens, jnp.maximum(length[:, None] - 1 - j, 0), 1)
        equal = (tokens == last) & (length[:, None] > j)
        running &= jnp.roll(equal, j, axis=1) & (position >= j)
        total += running
    return total


def copied_chain(tokens: Array, length: Array, start: Array, count: int, limit: Array) -> tuple[Array, Array]:
    """The root and `count` tokens of the text from `start` int32[B] (-1: none): tokens and valid [B, 1 + count].

    Valid as far as the text goes, and no deeper than `limit` int32[B].
    """
    root = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    index = start[:, None] + jnp.arange(count)
    copied = jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), 1)
    valid = (start[:, None] >= 0) & (index < length[:, None]) & (jnp.arange(count) < limit[:, None])
    return jnp.concatenate([root, copied], 1), jnp.concatenate([jnp.ones_like(root, bool), valid], 1)
