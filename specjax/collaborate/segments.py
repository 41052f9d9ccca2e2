"""Segmenters, which find the end of a step: the first completed delimiter, a string or a sequence of tokens.

A delimiter may lie within a token, such as ".\\n\\n", or span several tokens. So tokens drive an automaton over the
characters of the delimiters (Aho, Corasick: Efficient string matching, 1975). Its table has one entry per state and
token.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.serving.detokenizer import TextDecoder
from specjax.types import Array


class Segmenter(NamedTuple):
    """An automaton that reads a step from its first token on."""

    following: Array  # int32[S, V], the state after a token; S: the step ends with it


class Run(NamedTuple):
    """The state of a segmenter in each row."""

    at: Array  # int32[B], its state
    over: Array  # bool[B], True: the step has ended


def start(batch: int) -> Run:
    """Return the initial state for `batch` rows."""
    return Run(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool))


def follow(segmenter: Segmenter, run: Run, tokens: Array, count: Array) -> tuple[Run, Array]:
    """Read the first `count` int32[B] of `tokens` int32[B, N].

    Returns: the new state, and int32[B], the number of these tokens that belong to the step.
    """
    last = segmenter.following.shape[0]

    def one(carry: tuple[Run, Array], column: tuple[Array, Array]) -> tuple[tuple[Run, Array], None]:
        (at, over), total = carry
        place, token = column
        reads = ~over & (place < count)
        at = jnp.where(reads, segmenter.following[at, token], at)
        return (Run(at, over | (at == last)), total + reads), None

    columns = jnp.arange(tokens.shape[1]), tokens.T
    return jax.lax.scan(one, (run, jnp.zeros_like(count)), columns)[0]


def after_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> Segmenter:
    """Return a segmenter that ends steps after any of these token sequences. Raises: UsageError if one is empty."""
    return _automaton([tuple(ids) for ids in sequences], [(token,) for token in range(vocab_size)])


def after_strings(strings: Sequence[str], tokenizer: TextDecoder, vocab_size: int) -> Segmenter:
    """Return a segmenter that ends steps with the token that completes any of these strings. Raises: UsageError."""
    if isinstance(strings, str):
        raise UsageError("strings must be a list of strings, such as ['\\n\\n'], not one")
    return _automaton([tuple(string) for string in strings], _texts(cast(Any, tokenizer), vocab_size))


def after_any(tokens: Sequence[int], vocab_size: int) -> Segmenter:
    """Return a segmenter that ends steps after any of these tokens."""
    return after_tokens([(token,) for token in tokens], vocab_size)


@functools.lru_cache(maxsize=4)
def _texts(tokenizer: Any, vocab_size: int) -> list[tuple[str, ...]]:
    return [tuple(tokenizer.decode([token])) for token in range(vocab_size)]


def _automaton(ends: Sequence[tuple], texts: Sequence[tuple]) -> Segmenter:
    if not all(ends):
        raise UsageError("a delimiter must not be empty; leave it out")
    states: dict[tuple, int] = {(): 0}
    for end in ends:
        for length in range(1, len(end)):
            states.setdefault(end[:length], len(states))
    letters = {letter for end in ends for letter in end}
    memo: dict[tuple[tuple, Hashable], tuple | None] = {}

    def advance(state: tuple, letter: Hashable) -> tuple | None:
        """Return the longest suffix of the input that begins a delimiter, or None if a delimiter is complete."""
        if (state, letter) not in memo:
            read = (*state, letter)
            suffixes = [read[i:] for i in range(len(read) + 1)]
            complete = any(suffix in ends for suffix in suffixes)
            memo[state, letter] = None if complete else next(suffix for suffix in suffixes if suffix in states)
        return memo[state, letter]

    following = np.zeros((len(states), len(texts)), np.int32)  # a token without any of the letters restarts
    for token, text in enumerate(texts):
        if not text:  # a special token: nothing was read
            following[:, token] = np.arange(len(states))
        if letters.isdisjoint(text):
            continue
        for state, row in states.items():
            at: tuple | None = state
            for letter in text:
                at = advance(at, letter) if at is not None else None
            following[row, token] = len(states) if at is None else states[at]
    return Segmenter(jnp.asarray(following))
