"""Counters of phrases in a text, by substring: a phrase may begin and end within a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.collaborate import automata
from specjax.errors import UsageError
from specjax.serving.detokenizer import TextDecoder
from specjax.types import Array


class PhraseCounter(NamedTuple):
    """An automaton that counts phrases."""

    following: Array  # int16[S, V], the state after a token
    completed: Array  # int16[S, V], number of phrases that a token completes


Phrases = PhraseCounter | Sequence[Sequence[int]]
"""A counter, or the phrases as sequences of token ids."""


def count_strings(strings: Sequence[str], tokenizer: TextDecoder, vocab_size: int) -> PhraseCounter:
    """Return a counter of strings in a text, without regard to the case of ASCII letters. Raises: UsageError."""
    if isinstance(strings, str):
        raise UsageError("strings must be a list of strings, such as ['wait'], not one")
    tokens = [token.lower() for token in automata.spellings(cast(Any, tokenizer), vocab_size)]
    return _counter(automata.of_strings([string.encode().lower() for string in strings], tokens))


def count_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> PhraseCounter:
    """Return a counter of sequences of tokens. Raises: UsageError for an empty one."""
    return _counter(automata.of_sequences(sequences, vocab_size))


def to_counter(phrases: Phrases, vocab_size: int) -> PhraseCounter:
    """Return the counter itself, or one of sequences of tokens. Raises: UsageError for an empty sequence."""
    return phrases if isinstance(phrases, PhraseCounter) else count_tokens(phrases, vocab_size)


def count(counter: PhraseCounter, tokens: Array, start: Array, end: Array) -> Array:
    """Count the phrases int32[B] from `start` to `end` int32[B] of tokens int32[B, L]."""
    size, length = tokens.shape[1], jnp.max(end - start, initial=0)

    def read(offset: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        at, total = carry
        place, inside = start + offset, start + offset < end
        token = take_along(tokens, jnp.clip(place, 0, size - 1)[:, None], 1)[:, 0]
        total += jnp.where(inside, counter.completed[at, token].astype(jnp.int32), 0)
        return jnp.where(inside, counter.following[at, token].astype(jnp.int32), at), total

    zero = jnp.zeros_like(start)
    return jax.lax.fori_loop(0, length, read, (zero, zero))[1]


def _counter(table: automata.TokenTable) -> PhraseCounter:
    return PhraseCounter(jnp.asarray(table.following, jnp.int16), jnp.asarray(table.completed, jnp.int16))
