"""Search for the end of a text in itself or in another text, by one vectorised comparison without an automaton."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.trees.operations import chain
from specjax.types import Array, Context, TokenTree

NO_TOKEN = -4
"""The largest number in place of a placeholder. Missing tokens are -1, padding is -2, and ends of samples are -3."""


def copyable_tokens(context: Context) -> Array:
    """Return the tokens int32[B, L] of a context, with another negative number at each placeholder of an image vector.

    A run of placeholders then matches no other one, and no chain copies them.
    """
    placeholder = None if context.target is None else context.target.model.capabilities.placeholder
    if placeholder is None:
        return context.tokens
    return jnp.where(context.tokens == placeholder, NO_TOKEN - jnp.arange(context.tokens.shape[1]), context.tokens)


def copyable_text(context: Context) -> tuple[Array, Array]:
    """Return the tokens int32[B, S + L] that drafters may copy, and their number int32[B].

    They are the text, and before it what the encoder of the target has read, if there is one. Sources end where the
    texts begin, and negative numbers fill the places before short ones.
    """
    tokens, length, source = copyable_tokens(context), context.length, context.source
    if source is None:
        return tokens, length
    size = source.tokens.shape[1]
    place = jnp.arange(size) - size + source.length[:, None]
    source_tokens = jnp.where(place >= 0, take_along(source.tokens, jnp.maximum(place, 0), 1), NO_TOKEN)
    return jnp.concatenate([source_tokens, tokens], 1), length + size


def last_tokens(tokens: Array, length: Array, count: int) -> Array:
    """Return int32[B, count]: the last tokens of the texts, in reverse order; -1 where a text is shorter."""
    place = length[:, None] - 1 - jnp.arange(count)
    return jnp.where(place >= 0, take_along(tokens, jnp.maximum(place, 0), 1), -1)


def match_length(source: Array, size: Array, ending: Array) -> Array:
    """Return int32[B, L]: the number of tokens of `source` int32[B, L], ending at i, that match the end of a text.

    Positions from `size` int32[B] on get 0. `ending` int32[B, n] is the result of `last_tokens`; no match is longer
    than n. The n * L integer comparisons cost little compared with a model pass. For matches within one text, exclude
    its last token from `size`.
    """
    length, longest = source.shape[1], ending.shape[1]
    matches = jnp.arange(length) < size[:, None]
    total = jnp.zeros(source.shape, jnp.int32)
    source = jnp.pad(
        source, ((0, 0), (longest - 1, 0)), constant_values=-2
    )  # positions before the beginning match no token
    for j in range(longest):
        offset = longest - 1 - j
        matches &= source[:, offset : offset + length] == ending[:, j : j + 1]
        total += matches
    return total


def copied_chain(root: Array, source: Array, size: Array, start: Array, count: int, limit: Array) -> TokenTree:
    """Return the chain of `root` int32[B, 1] and `count` tokens of `source` int32[B, L] from `start` int32[B].

    A start of -1 gives no tokens. Nodes are valid within the first size[b] tokens, down to depth `limit` int32[B]. The
    chain ends before a negative number (`copyable_tokens`).
    """
    index = start[:, None] + jnp.arange(count)
    copied = take_along(source, jnp.clip(index, 0, source.shape[1] - 1), 1)
    valid = (start[:, None] >= 0) & (index < size[:, None]) & (jnp.arange(count) < limit[:, None])
    valid &= jnp.cumsum(copied < 0, 1) == 0
    tokens = jnp.concatenate([root, jnp.maximum(copied, 0)], 1)
    return chain(tokens, jnp.concatenate([jnp.ones_like(root, bool), valid], 1))
