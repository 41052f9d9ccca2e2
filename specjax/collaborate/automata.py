"""Automata over tokens that follow the bytes of a text: tables with one entry per state and token.

A word may lie within a token, such as ".\\n\\n", or span several tokens. An automaton over its bytes (Aho, Corasick:
Efficient string matching, 1975) is composed along the bytes of each token. Letters are classes: 0 is every letter that
no word has.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError


class ByteAutomaton(NamedTuple):
    """An automaton over classes of letters, with S states and K classes."""

    following: np.ndarray  # int32[S, K], the state after a letter
    completed: np.ndarray  # int32[S, K], number of words that the letter completes


class TokenTable(NamedTuple):
    """An automaton over tokens, with S states."""

    following: np.ndarray  # int32[S, V], the state after a token
    completed: np.ndarray  # int32[S, V], number of words that the token completes


@functools.lru_cache(maxsize=4)
def spellings(tokenizer: Any, vocab_size: int) -> tuple[bytes, ...]:
    """Return the bytes that each token adds to a text; none for control tokens and ids without a piece.

    A tokenizer without `spellings` decodes each token alone, which may lose a blank before a word.
    """
    if not hasattr(tokenizer, "spellings"):
        return tuple(tokenizer.decode([token]).encode() for token in range(vocab_size))
    spelled = [piece or b"" for piece in tokenizer.spellings()][:vocab_size]
    return (*spelled, *[b""] * (vocab_size - len(spelled)))


def of_words(words: Sequence[Sequence[Hashable]]) -> tuple[ByteAutomaton, dict[Hashable, int]]:
    """Return the automaton of some words, and the class of each of their letters. Raises: UsageError if one is empty.

    A state is the longest suffix of the input that begins a word.
    """
    keys = [tuple(word) for word in words]
    if not all(keys):
        raise UsageError("a delimiter or a pattern must not be empty; leave it out")
    prefixes = {(), *(word[:length] for word in keys for length in range(1, len(word) + 1))}
    states = {prefix: number for number, prefix in enumerate(sorted(prefixes, key=len))}
    letters = list(dict.fromkeys(letter for word in keys for letter in word))
    following = np.zeros((len(states), len(letters) + 1), np.int32)
    completed = np.zeros_like(following)
    for prefix, state in states.items():
        for number, letter in enumerate(letters, 1):
            read = (*prefix, letter)
            suffixes = [read[i:] for i in range(len(read) + 1)]
            following[state, number] = states[next(suffix for suffix in suffixes if suffix in states)]
            completed[state, number] = sum(suffix in keys for suffix in suffixes)
    return ByteAutomaton(following, completed), {letter: number for number, letter in enumerate(letters, 1)}


def over_tokens(automaton: ByteAutomaton, tokens: Sequence[Sequence[int]]) -> TokenTable:
    """Compose the automaton along each token, a sequence of classes such as `bytes`."""
    unique = sorted(dict.fromkeys(tokens), key=len, reverse=True)
    row = {token: number for number, token in enumerate(unique)}
    state = np.tile(np.arange(len(automaton.following), dtype=np.int32), (len(unique), 1))  # [U, S]
    count = np.zeros_like(state)
    lengths = np.array([len(token) for token in unique])
    for place in range(lengths.max(initial=0)):
        active = int(np.sum(lengths > place))  # the longest come first
        letter = np.array([token[place] for token in unique[:active]])[:, None]
        count[:active] += automaton.completed[state[:active], letter]
        state[:active] = automaton.following[state[:active], letter]
    index = np.array([row[token] for token in tokens])
    return TokenTable(np.ascontiguousarray(state[index].T), np.ascontiguousarray(count[index].T))


def of_sequences(sequences: Sequence[Sequence[int]], vocab_size: int) -> TokenTable:
    """Return the automaton of some token sequences over tokens. Raises: UsageError if one is empty."""
    automaton, classes = of_words(sequences)
    return over_tokens(automaton, [(classes.get(token, 0),) for token in range(vocab_size)])


def of_strings(strings: Sequence[bytes], tokens: Sequence[bytes]) -> TokenTable:
    """Return the automaton of some strings over tokens, given by their bytes. Raises: UsageError if one is empty."""
    automaton, classes = of_words(strings)
    return over_tokens(automaton, classes_of_bytes(tokens, classes))


def classes_of_bytes(tokens: Sequence[bytes], classes: dict[Hashable, int]) -> list[bytes]:
    """Return the tokens as classes, with the class of each byte."""
    table = bytes(classes.get(byte, 0) for byte in range(256))
    return [token.translate(table) for token in tokens]
