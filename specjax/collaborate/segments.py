"""Segmenters, which find the end of a step: the first completed delimiter, a string or a sequence of tokens.

A step ends with the token that completes a delimiter. A segmenter of sentences also ends a step before a token: a full
stop after a digit ends a sentence only if no digit follows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax.collaborate import automata
from specjax.collaborate.automata import ByteAutomaton, TokenTable
from specjax.errors import UsageError
from specjax.serving.detokenizer import TextDecoder
from specjax.types import Array


class Segmenter(NamedTuple):
    """An automaton that reads a step from its first token on."""

    following: Array  # int32[S, V], the state after a token; S: the step ends with it, S + 1: it ended before the token


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
        return (Run(at, over | (at >= last)), total + (reads & (at <= last))), None

    columns = jnp.arange(tokens.shape[1]), tokens.T
    return jax.lax.scan(one, (run, jnp.zeros_like(count)), columns)[0]


def after_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> Segmenter:
    """Return a segmenter that ends steps after any of these token sequences. Raises: UsageError if one is empty."""
    return _ending(automata.of_sequences(sequences, vocab_size))


def after_strings(strings: Sequence[str], tokenizer: TextDecoder, vocab_size: int) -> Segmenter:
    """Return a segmenter that ends steps with the token that completes any of these strings. Raises: UsageError."""
    if isinstance(strings, str):
        raise UsageError("strings must be a list of strings, such as ['\\n\\n'], not one")
    tokens = automata.spellings(cast(Any, tokenizer), vocab_size)
    return _ending(automata.of_strings([string.encode() for string in strings], tokens))


def after_any(tokens: Sequence[int], vocab_size: int) -> Segmenter:
    """Return a segmenter that ends steps after any of these tokens."""
    return after_tokens([(token,) for token in tokens], vocab_size)


def _ending(table: TokenTable) -> Segmenter:
    """Return the segmenter that ends a step with the token that completes a word of the automaton."""
    return _segmenter(np.where(table.completed > 0, len(table.following), table.following))


def _segmenter(following: np.ndarray) -> Segmenter:
    return Segmenter(jnp.asarray(following, jnp.int32))


OTHER, MARK, DOT, DIGIT = range(4)
"""The classes of bytes of `after_sentences`."""
TEXT, NUMBER, OPEN, OVER, EARLIER, DOTTED = range(6)
"""The states within a token: a text, after a digit, after a digit and a full stop of an earlier token, the end of the
sentence with this token or before it, and after a digit and a full stop of this token."""
SENTENCES = ByteAutomaton(
    np.array([
        [TEXT, OVER, OVER, NUMBER],
        [TEXT, OVER, DOTTED, NUMBER],
        [EARLIER, EARLIER, EARLIER, NUMBER],
        [OVER] * 4,
        [EARLIER] * 4,
        [OVER, OVER, OVER, NUMBER],
    ]),
    np.zeros((6, 4), np.int32),
)  # fmt: skip


def after_sentences(tokenizer: TextDecoder, vocab_size: int) -> Segmenter:
    """Return a segmenter that ends steps with the token that has one of . ? ! or a line break.

    A full stop between two digits belongs to a number. With byte-level tokens, the blank after a full stop belongs to
    the next token, so the next sentence begins with that token.
    """
    digits: dict[Hashable, int] = {byte: DIGIT for byte in b"0123456789"}
    classes = digits | {ord("?"): MARK, ord("!"): MARK, ord("\n"): MARK, ord("."): DOT}
    tokens = automata.classes_of_bytes(automata.spellings(cast(Any, tokenizer), vocab_size), classes)
    following = automata.over_tokens(SENTENCES, tokens).following[: OPEN + 1]
    return _segmenter(np.where(following == DOTTED, OPEN, following))
