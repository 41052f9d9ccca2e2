"""Deterministic automata over tokens: the allowed tokens of each state, and the next state after each of them.

outlines-core compiles regular expressions to automata over bytes: `pip install 'specjax[constraints]'`. Tokens are
then composed of their bytes. Tokens that lead from every state to the same state form one class. A vocabulary of
150,000 tokens has a few hundred classes, so the tables are small and are built in about a second.

States from which no text can end are removed. Decoding therefore never reaches a state without allowed tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import first_line
from specjax.processors import schemas
from specjax.processors.byte_automaton import NONE, CompileError, compile_bytes, compile_in_process
from specjax.processors.expressions import PatternError, without_anchors

MAX_STATES = 1 << 16
MAX_ENTRIES = 1 << 27
"""Largest number of (state, function) pairs while tokens are composed."""
MAX_ENTRIES = 1 << 27
"""Largest number of (state, class) pairs while tokens are composed."""


class Spells(Protocol):
    """The part of a tokenizer that automata need."""

    @property
    def eos(self) -> tuple[int, ...]: ...

    def spellings(self) -> Sequence[bytes | None]:
        """Return the bytes that each token adds to a text, or None for control tokens."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over the tokens of a vocabulary, as numpy arrays. It starts in state 0."""

    classes: np.ndarray  # int32[V], the class of each token, or NONE
    following: np.ndarray  # int32[S, C], the state after a token of each class, or NONE
    accepting: np.ndarray  # bool[S]
    eos: tuple[int, ...]  # tokens that end a text, in accepting states

    @property
    def highest(self) -> int:
        """Return the highest token that any text of the automaton has."""
        return int(max(*self.eos, np.flatnonzero(self.classes != NONE).max(initial=0)))

    def content(self) -> list[Any]:
        """Return all values in a form that can be compared."""
        arrays = self.classes, self.following, self.accepting
        return [*(array.tobytes() for array in arrays), self.following.shape, self.eos]


def regex(
    pattern: str, tokenizer: Spells, *, eos: Sequence[int] | None = None, seconds: float | None = None
) -> Automaton:  # fmt: skip
    """Compile a regular expression that the complete text must match.

    The syntax is that of Rust's regex crate, without look-around and back-references. Anchors at the beginning and at
    the end restrict nothing.

    Args:
      seconds: compile in a process of its own, with this limit and one of memory. Use it for expressions of strangers.

    Raises: UsageError for an invalid expression, an anchor inside, or an expression that no text of these tokens
      matches.
    """
    subject = "the regular expression"
    try:
        bare = without_anchors(pattern)
    except PatternError as error:
        raise UsageError(f"{subject} has {error}") from None
    return compile_pattern(bare, tokenizer, eos, subject, seconds, is_valid=False)


def json_schema(
    schema: str | bool | Mapping[str, Any],
    tokenizer: Spells,
    *,
    eos: Sequence[int] | None = None,
    seconds: float | None = None,
) -> Automaton:
    """Compile a JSON schema. Every text that ends is JSON and satisfies the schema.

    Properties must have the order of the schema, with at most one space between two parts. `schemas` has the supported
    keywords.

    Args:
      seconds: as in `regex`.

    Raises: UsageError for an invalid schema, an unsupported keyword, or a schema that no text of these tokens
      satisfies.
    """
    subject = "the JSON schema"
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{subject} is not JSON: {first_line(error)}") from None
    return compile_pattern(schemas.to_regex(schema), tokenizer, eos, subject, seconds, is_valid=True)


def automaton(
    start: int, transitions: Mapping[int, Mapping[int, int]], final: set[int], eos: Sequence[int], subject: str = "it"
) -> Automaton:
    """Build an automaton from arbitrary state numbers, without the states from which no text can end.

    Args:
      transitions: for each state, the next state after each token.

    Raises: UsageError if no text is accepted.
    """
    states = {start, *final, *transitions, *(target for row in transitions.values() for target in row.values())}
    place = {state: number for number, state in enumerate([start, *sorted(states - {start})])}
    tokens = sorted({token for row in transitions.values() for token in row})
    following = np.full((len(place), len(tokens)), NONE, np.int32)
    column = {token: number for number, token in enumerate(tokens)}
    for state, row in transitions.items():
        for token, target in row.items():
            following[place[state], column[token]] = place[target]
    classes = np.full(max(tokens, default=0) + 1, NONE, np.int32)
    classes[tokens] = np.arange(len(tokens))
    accepting = np.array([state in final for state in place])
    return _trimmed(classes, following, accepting, eos, subject)


def compile_pattern(
    pattern: str, tokenizer: Spells, eos: Sequence[int] | None, subject: str, seconds: float | None, *, is_valid: bool
) -> Automaton:  # fmt: skip
    """Compile a pattern.

    Args:
      subject: name of the constraint in errors. is_valid: the pattern was made by `schemas`, and needs no check.

    Raises: UsageError for an invalid expression, or one that no text of these tokens matches.
    """
    ends = tuple(tokenizer.eos if eos is None else eos)
    if not ends:
        raise UsageError(f"{subject} needs an eos to end texts, but the tokenizer has none; pass eos=")
    with optional_import("constraints", "regular expressions and JSON schemas need"):
        import outlines_core  # noqa: F401
    try:
        arguments = pattern, is_valid
        compiled = compile_bytes(*arguments) if seconds is None else compile_in_process(*arguments, seconds)
    except CompileError as error:
        raise UsageError(f"{subject} {error}") from None
    following, accepting = compiled
    spellings = [None if token in ends else text for token, text in enumerate(tokenizer.spellings())]
    classes, columns = _compose(following, spellings, subject)
    return _trimmed(classes, columns, accepting, ends, subject)


def _compose(
    following: np.ndarray, spellings: Sequence[bytes | None], subject: str
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the class of each token, and the states int32[S, C] after the tokens of each class.

    All tokens advance by one byte at a time. Prefixes that lead from every state to the same state are one function.
    """
    dead = len(following)
    columns, letter_of = np.unique(
        np.pad(following, ((0, 1), (0, 0)), constant_values=NONE), axis=1, return_inverse=True
    )
    step, letter_of = np.where(columns == NONE, dead, columns), letter_of.reshape(-1)
    tokens = np.array([token for token, text in enumerate(spellings) if text], np.int64)
    sizes = np.array([len(spellings[token] or b"") for token in tokens], np.int64)
    letters = letter_of[np.frombuffer(b"".join(text for text in spellings if text), np.uint8)]
    starts = np.cumsum(sizes) - sizes
    functions = [np.arange(dead + 1), np.full(dead + 1, dead)]  # the states after a prefix, from each state
    numbers = {function.tobytes(): number for number, function in enumerate(functions)}
    function_of = np.zeros(len(tokens), np.int64)
    for place in range(int(sizes.max(initial=0))):
        active = np.flatnonzero((sizes > place) & (function_of != 1))
        pairs = function_of[active] * step.shape[1] + letters[starts[active] + place]
        distinct, inverse = np.unique(pairs, return_inverse=True)
        results = np.empty(len(distinct), np.int64)
        for index, (number, letter) in enumerate(zip(*np.divmod(distinct, step.shape[1]), strict=True)):
            function = step[functions[number], letter]
            results[index] = numbers.setdefault(function.tobytes(), len(functions))
            if results[index] == len(functions):
                functions.append(function)
        if len(functions) * dead > MAX_ENTRIES:
            raise UsageError(f"{subject} is too large; limit its lengths or the number of its parts")
        function_of[active] = results[inverse]
    used, class_of = np.unique(function_of, return_inverse=True)
    classes = np.full(len(spellings), NONE, np.int32)
    classes[tokens] = class_of
    table = np.stack([functions[number] for number in used], 1) if len(used) else np.empty((dead + 1, 0), np.int64)
    return classes, np.where(table == dead, NONE, table)[:dead]


def _trimmed(
    classes: np.ndarray, following: np.ndarray, accepting: np.ndarray, eos: Sequence[int], subject: str
) -> Automaton:
    """Return the automaton without the states that no text has, and with distinct classes only.

    Raises: UsageError if no text is accepted.
    """
    count = len(following)
    states, columns = np.nonzero(following != NONE)
    edges = np.unique(states * count + following[states, columns])
    tails, heads = np.divmod(edges, count)
    is_used = _reach(heads, tails, np.flatnonzero(accepting), count)
    if not is_used[0]:
        raise UsageError(f"no text of the model's tokens satisfies {subject}")
    inside = is_used[tails] & is_used[heads]
    is_used = _reach(tails[inside], heads[inside], np.array([0]), count)
    if is_used.sum() > MAX_STATES:
        raise UsageError(f"{subject} has {is_used.sum()} states, more than {MAX_STATES}; limit its lengths")
    place = np.append(np.where(is_used, np.cumsum(is_used) - 1, NONE), NONE)  # entry -1 is that of NONE
    table, class_of = np.unique(place[following[is_used]], axis=1, return_inverse=True)
    possible = np.any(table != NONE, 0)
    number = np.append(np.where(possible, np.cumsum(possible) - 1, NONE)[class_of.reshape(-1)], NONE)
    return Automaton(
        number[classes].astype(np.int32), table[:, possible].astype(np.int32), accepting[is_used], tuple(eos)
    )  # fmt: skip


def _reach(tails: np.ndarray, heads: np.ndarray, sources: np.ndarray, count: int) -> np.ndarray:
    """Return the states bool[count] that the edges tails -> heads reach from some states."""
    order = np.argsort(tails, kind="stable")
    targets, bounds = heads[order].tolist(), np.searchsorted(tails[order], np.arange(count + 1)).tolist()
    reached, waiting = np.zeros(count, bool), sources.tolist()
    reached[sources] = True
    while waiting:
        state = waiting.pop()
        for target in targets[bounds[state] : bounds[state + 1]]:
            if not reached[target]:
                reached[target] = True
                waiting.append(target)
    return reached
