"""Deterministic automata over tokens: the allowed tokens of each state, and the next state after each of them.

outlines-core compiles regular expressions: `pip install 'specjax[constraints]'`. The result is converted to arrays
without the states from which no text can end. Decoding therefore never reaches a state without allowed tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import first_line
from specjax.processors import schemas
from specjax.processors.expressions import PatternError, without_anchors

MAX_STATES = 1 << 16
END, AT_END = "\U0010ffff", (1 << 32) - 1
"""A character that marks the end of every text without being part of it, and its token.

outlines-core 0.2.14 loses transitions from states where a text may end to states where it may not. For `(ab)*` it
rejects a and b as two tokens. So a text ends only after END, and a state is accepting if END may follow.
"""


class Spells(Protocol):
    """The part of a tokenizer that automata need."""

    @property
    def eos(self) -> tuple[int, ...]: ...

    def spellings(self) -> Sequence[bytes | None]:
        """Return the bytes that each token adds to a text, or None for control tokens."""
        ...


class Automaton(NamedTuple):
    """A deterministic automaton over the tokens of a vocabulary, as numpy arrays. It starts in state 0.

    The transitions of state s are entries `offsets[s] : offsets[s + 1]` of `tokens` and `following`.
    """

    accepting: np.ndarray  # bool[S]
    offsets: np.ndarray  # int32[S + 1]
    tokens: np.ndarray  # int32[T], increasing within a state
    following: np.ndarray  # int32[T], the state after each token
    eos: tuple[int, ...]  # tokens that end a text, in accepting states


def regex(pattern: str, tokenizer: Spells, *, eos: Sequence[int] | None = None) -> Automaton:
    """Compile a regular expression that the complete text must match.

    The syntax is that of Rust's regex crate, without look-around and back-references. Anchors at the beginning and at
    the end restrict nothing.

    Raises: UsageError for an invalid expression, an anchor inside, or an expression that no text of these tokens
      matches.
    """
    subject = "the regular expression"
    try:
        return _compiled(without_anchors(pattern), tokenizer, eos, subject)
    except PatternError as error:
        raise UsageError(f"{subject} has {error}") from None


def json_schema(
    schema: str | bool | Mapping[str, Any], tokenizer: Spells, *, eos: Sequence[int] | None = None
) -> Automaton:
    """Compile a JSON schema. Every text that ends is JSON and satisfies the schema.

    Properties must have the order of the schema, with at most one space between two parts. `schemas` has the supported
    keywords.

    Raises: UsageError for an invalid schema, an unsupported keyword, or a schema that no text of these tokens
      satisfies.
    """
    subject = "the JSON schema"
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{subject} is not JSON: {first_line(error)}") from None
    return _compiled(schemas.to_regex(schema), tokenizer, eos, subject)


def _library() -> Any:
    with optional_import("constraints", "regular expressions and JSON schemas need"):
        import outlines_core
    return outlines_core


def _compiled(pattern: str, tokenizer: Spells, eos: Sequence[int] | None, subject: str) -> Automaton:
    """Compile a pattern. `subject` names the constraint in errors."""
    library, ends = _library(), tuple(tokenizer.eos if eos is None else eos)
    if not ends:
        raise UsageError(f"{subject} needs an eos to end texts, but the tokenizer has none; pass eos=")
    ids: dict[bytes, list[int]] = {}
    for token, spelling in enumerate(tokenizer.spellings()):
        if spelling and token not in ends:
            ids.setdefault(spelling, []).append(token)
    try:
        # Compile the pattern itself over all bytes first. The wrapping below could make an invalid expression valid.
        library.Index(pattern, library.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
        index = library.Index(f"(?:{pattern}){END}", library.Vocabulary(ends[0], ids | {END.encode(): [AT_END]}))
    except (ValueError, TypeError, OverflowError) as error:
        if "incompatible" in str(error):  # the library's error for a state without any token
            raise UsageError(f"no text of the model's tokens satisfies {subject}") from None
        raise UsageError(f"{subject} is invalid or not supported: {first_line(error)}") from None
    start, rows = index.get_initial_state(), index.get_transitions()
    # END is also read as content, by `.` and by negated classes. Only where it completes a text does it lead to an end.
    complete = set(index.get_final_states())
    final = {state for state, row in rows.items() if row.get(AT_END) in complete}
    rows = {
        s: {token: target for token, target in row.items() if token not in (AT_END, *ends)} for s, row in rows.items()
    }
    return automaton(start, rows, final, ends, subject)


def automaton(
    start: int, transitions: Mapping[int, Mapping[int, int]], final: set[int], eos: Sequence[int], subject: str = "it"
) -> Automaton:
    """Build an automaton from arbitrary state numbers, without the states from which no text can end.

    Args:
      transitions: for each state, the next state after each token.

    Raises: UsageError if no text is accepted.
    """
    predecessors: dict[int, set[int]] = {}
    for state, row in transitions.items():
        for target in set(row.values()):
            predecessors.setdefault(target, set()).add(state)
    alive, waiting = set(final), list(final)
    while waiting:
        new = predecessors.get(waiting.pop(), set()) - alive
        alive |= new
        waiting += new
    if start not in alive:
        raise UsageError(f"no text of the model's tokens satisfies {subject}")
    place = {state: number for number, state in enumerate([start, *sorted(alive - {start})])}
    if len(place) > MAX_STATES:
        raise UsageError(f"{subject} has {len(place)} states, more than {MAX_STATES}; limit its lengths")
    counts, tokens, following = [0], [], []
    for state in place:
        edges = sorted(
            (token, place[target]) for token, target in transitions.get(state, {}).items() if target in alive
        )
        counts.append(len(edges))
        pairs = np.array(edges, np.int32).reshape(-1, 2)
        tokens.append(pairs[:, 0])
        following.append(pairs[:, 1])
    accepting = np.array([state in final for state in place])
    offsets = np.cumsum(counts, dtype=np.int32)
    return Automaton(accepting, offsets, np.concatenate(tokens), np.concatenate(following), tuple(eos))
