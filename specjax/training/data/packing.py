"""Texts in rows of one shape, several to a row, and which of their tokens count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.types import Array

BORDER = 2
"""A text of so many tokens has no place to draft from: a pair takes two, and what follows is the first draft."""


class Text(NamedTuple):
    """A prompt and what the target wrote."""

    tokens: tuple[int, ...]
    answer: int  # how many tokens the prompt has: what follows is the target's


class Lesson(NamedTuple):
    """Rows of texts behind one another."""

    tokens: Array  # int32[B, T]
    first: Array  # int32[B, T], where the text of each token begins; of the rest of a row, where that begins
    counts: Array  # bool[B, T], which tokens the target wrote


def pack(texts: Iterable[Text], rows: int, length: int, alone: bool = False) -> list[Lesson]:
    """Lessons of `rows` by `length`, in the order of the texts, each put into the first row with room for it.

    A text longer than a row is cut. The last lesson may have empty rows; no text is in two. alone: one text to a row.
    """
    lessons, open_rows = [], [_Row(length) for _ in range(rows)]
    for text in texts:
        text = Text(text.tokens[:length], min(text.answer, length))
        row = next((row for row in open_rows if row.fits(text, alone)), None)
        if row is None:
            lessons.append(_lesson(open_rows))
            open_rows = [_Row(length) for _ in range(rows)]
            row = open_rows[0]
        row.add(text)
    if any(row.used for row in open_rows):
        lessons.append(_lesson(open_rows))
    return lessons


def numbered(texts: Sequence[Text]) -> list[Text]:
    """The texts with, in place of each token, its number among all of theirs, from 1 on: packed, these say which tokens
    a lesson has, and 0 that there is none."""
    begin = np.cumsum([1, *(len(text.tokens) for text in texts)]).tolist()
    return [Text(tuple(range(at, at + len(text.tokens))), text.answer) for at, text in zip(begin, texts, strict=False)]


class _Row:
    def __init__(self, length: int):
        self.tokens, self.first = np.zeros(length, np.int32), np.zeros(length, np.int32)
        self.counts = np.zeros(length, bool)
        self.used = 0

    def fits(self, text: Text, alone: bool) -> bool:
        return not self.used if alone else self.used + len(text.tokens) <= len(self.tokens)

    def add(self, text: Text) -> None:
        here = slice(self.used, self.used + len(text.tokens))
        self.tokens[here] = text.tokens
        self.first[here.start :] = here.start
        self.counts[here.start + text.answer : here.stop] = True
        self.used = here.stop
        self.first[here.stop :] = here.stop


def _lesson(rows: Sequence[_Row]) -> Lesson:
    tokens, first, counts = (np.stack([getattr(row, name) for row in rows]) for name in Lesson._fields)
    return Lesson(*map(jnp.asarray, (tokens, first, counts)))


def places_that_count(lesson: Lesson) -> np.ndarray:
    """bool[B, T]: pairs from which a draft begins that the target wrote: x_t, its root x_{t+1}, and x_{t+2}."""
    counts, first = np.asarray(lesson.counts), np.asarray(lesson.first)
    places = np.zeros_like(counts)
    places[:, :-BORDER] = counts[:, BORDER:] & (first[:, BORDER:] == first[:, :-BORDER])
    return places


def choose_places(lesson: Lesson, most: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """int32[B, R]: where drafts begin in each row, R `most` at most and the same for all; -1: nowhere.

    rng: chooses among more; None: the first.
    """
    chosen = []
    for row in places_that_count(lesson):
        there = np.flatnonzero(row)
        if len(there) > most:
            there = np.sort(rng.choice(there, most, replace=False)) if rng is not None else there[:most]
        chosen.append(np.pad(there, (0, most - len(there)), constant_values=-1))
    return np.stack(chosen).astype(np.int32)
