"""Where the end of a text occurs, in itself or in another: one vectorised compare, no automaton."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.trees.operations import chain
from specjax.types import Array, TokenTree


def last_tokens(tokens: Array, length: Array, count: int) -> Array:
    """int32[B, count]: the last tokens of texts, the very last first; -1 where a text has no more."""
    place = length[:, None] - 1 - jnp.arange(count)
    return jnp.where(place >= 0, take_along(tokens, jnp.maximum(place, 0), 1), -1)


def match_length(source: Array, size: Array, ending: Array) -> Array:
    """int32[B, L]: how many tokens of `source` int32[B, L] that end at i are the end of a text; 0 from `size` [B] on.

    `ending` int32[B, n]: from `last_tokens`; no match is longer than n. Its n * L integer compares are nothing beside a
    pass of a model. For matches within one text, leave its last token out of `size`.
    """
    length, longest = source.shape[1], ending.shape[1]
    running = jnp.arange(length) < size[:, None]
    total = jnp.zeros(source.shape, jnp.int32)
    source = jnp.pad(source, ((0, 0), (longest - 1, 0)), constant_values=-2)  # before its beginning nothing matches
    for j in range(longest):
        before = longest - 1 - j
        running &= source[:, before : before + length] == ending[:, j : j + 1]
        total += running
    return total


def copied_chain(root: Array, source: Array, size: Array, start: Array, count: int, limit: Array) -> TokenTree:
    """The chain of `root` int32[B, 1] and `count` tokens of `source` int32[B, L] from `start` int32[B] (-1: none).

    Valid as far as the first size[b] tokens go, and no deeper than `limit` int32[B].
    """
    index = start[:, None] + jnp.arange(count)
    copied = take_along(source, jnp.clip(index, 0, source.shape[1] - 1), 1)
    valid = (start[:, None] >= 0) & (index < size[:, None]) & (jnp.arange(count) < limit[:, None])
    return chain(jnp.concatenate([root, copied], 1), jnp.concatenate([jnp.ones_like(root, bool), valid], 1))
