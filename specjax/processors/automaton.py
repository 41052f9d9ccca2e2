"""Automata over tokens: which tokens may follow, by the state to which a text has come, and which state comes then.

Regular expressions and JSON schemas are compiled by outlines-core: `pip install 'specjax[constraints]'`. What it gives
becomes arrays here, without the states from which no text can end: so who follows them never comes to where nothing is
allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import first_line

MOST_STATES = 1 << 16
END, AT_END = "\U0010ffff", (1 << 32) - 1
"""A character behind every text, which is none, and the token for it. outlines-core 0.2.14 loses transitions from
states where a text may end to ones where it may not: of `(ab)*` it takes no a and b as two tokens. So here a text ends
nowhere but behind END, and where END may follow, it may end."""


class Spells(Protocol):
    """A tokenizer, as far as is needed here."""

    @property
    def eos(self) -> tuple[int, ...]: ...

    def spellings(self) -> Sequence[bytes | None]:
        """What each token adds to a text; None of control tokens."""
        ...


class Automaton(NamedTuple):
    """A deterministic automaton over the tokens of a vocabulary; numpy. It starts in state 0.

    The transitions of state s are entries `offsets[s] : offsets[s + 1]` of `tokens` and `following`.
    """

    accepting: np.ndarray  # bool[S]
    offsets: np.ndarray  # int32[S + 1]
    tokens: np.ndarray  # int32[T], rising within a state
    following: np.ndarray  # int32[T], the state after each
    eos: tuple[int, ...]  # tokens that end a text, in accepting states


def regex(pattern: str, tokenizer: Spells, *, eos: Sequence[int] | None = None) -> Automaton:
    """The texts that match the whole of a regular expression (without look-around and back-references).

    Raises: UsageError for an expression that is none, or that no text of these tokens matches.
    """
    return _compiled(pattern, tokenizer, eos, "the regular expression")


def json_schema(schema: str | Mapping[str, Any], tokenizer: Spells, *, eos: Sequence[int] | None = None) -> Automaton:
    """The JSON texts of a schema, with its properties in the order given, and at most one space between two parts.

    Raises: UsageError for a schema that is none, that outlines-core does not know, or that no text satisfies.
    """
    what, written = "the JSON schema", schema if isinstance(schema, str) else json.dumps(schema)
    try:
        pattern = _library().json_schema.build_regex_from_schema(written)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{what} cannot be followed: {first_line(error)}") from None
    return _compiled(pattern, tokenizer, eos, what, empty=False)  # the empty text is no JSON


def _library() -> Any:
    with optional_import("constraints", "regular expressions and JSON schemas need"):
        import outlines_core
    return outlines_core


def _compiled(pattern: str, tokenizer: Spells, eos: Sequence[int] | None, what: str, empty: bool = True) -> Automaton:
    """`empty`: whether the empty text may be accepted. what: for messages."""
    library, ends = _library(), tuple(tokenizer.eos if eos is None else eos)
    if not ends:
        raise UsageError(f"{what} ends texts by an eos, and the tokenizer has none; give eos=")
    ids: dict[bytes, list[int]] = {}
    for token, spelled in enumerate(tokenizer.spellings()):
        if spelled and token not in ends:
            ids.setdefault(spelled, []).append(token)
    try:
        # By itself, and over all bytes: what is put around it below must not make an expression of what is none.
        library.Index(pattern, library.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
        index = library.Index(f"(?:{pattern}){END}", library.Vocabulary(ends[0], ids | {END.encode(): [AT_END]}))
    except (ValueError, TypeError, OverflowError) as error:
        if "incompatible" in str(error):  # what the library says where it comes to a state without a token
            raise UsageError(f"no text of the model's tokens satisfies {what}") from None
        raise UsageError(f"{what} cannot be followed: {first_line(error)}") from None
    start, rows = index.get_initial_state(), index.get_transitions()
    final = {state for state, row in rows.items() if AT_END in row} - (set() if empty else {start})
    rows = {
        s: {token: after for token, after in row.items() if token not in (AT_END, *ends)} for s, row in rows.items()
    }
    return automaton(start, rows, final, ends, what)


def automaton(
    start: int, transitions: Mapping[int, Mapping[int, int]], final: set[int], eos: Sequence[int], what: str = "it"
) -> Automaton:
    """From states as any numbers, and the state after each token of each: without those that no text ends from.

    Raises: UsageError if no text is accepted.
    """
    before: dict[int, set[int]] = {}
    for state, row in transitions.items():
        for after in set(row.values()):
            before.setdefault(after, set()).add(state)
    alive, waiting = set(final), list(final)
    while waiting:
        new = before.get(waiting.pop(), set()) - alive
        alive |= new
        waiting += new
    if start not in alive:
        raise UsageError(f"no text of the model's tokens satisfies {what}")
    place = {state: number for number, state in enumerate([start, *sorted(alive - {start})])}
    if len(place) > MOST_STATES:
        raise UsageError(f"{what} has {len(place)} states, more than {MOST_STATES}; bound its lengths by less")
    counts, tokens, following = [0], [], []
    for state in place:
        edges = sorted((token, place[after]) for token, after in transitions.get(state, {}).items() if after in alive)
        counts.append(len(edges))
        pairs = np.array(edges, np.int32).reshape(-1, 2)
        tokens.append(pairs[:, 0])
        following.append(pairs[:, 1])
    accepting = np.array([state in final for state in place])
    offsets = np.cumsum(counts, dtype=np.int32)
    return Automaton(accepting, offsets, np.concatenate(tokens), np.concatenate(following), tuple(eos))
