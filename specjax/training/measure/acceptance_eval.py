"""Tokens per pass that a head or a draft model will serve, without decoding.

Until its first error a greedy draft's tokens are the text's, so the round from place t accepts as many tokens as lead
its training pass rightly. A decoder that starts at the end of the prompt goes from t to t + accepted + 1; walking the
text so gives its very rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax.numerics.global_arrays import gather, place
from specjax.training.data.packing import Lesson, Text, pack, places_that_count
from specjax.training.objectives.trainables import Pupil, learner_of
from specjax.types import Array, PyTree, Target


class Served(NamedTuple):
    """Of greedy texts, each of which costs its own passes. The bonus token of a pass counts."""

    tokens: int
    passes: int
    first: float  # how often the first draft of a place is the text's, over all places

    @property
    def per_pass(self) -> float:
        return self.tokens / max(self.passes, 1)


def served(target: Target, pupil: Pupil, texts: Sequence[Text], *, depths: int, rows: int, length: int) -> Served:
    """What a chain of `depths` drafts serves of texts that the target wrote greedily.

    rows, length: shape of the passes. A text longer than `length` is cut there.
    """
    lessons = pack(texts, rows, length)
    tokens = passes = right = places = 0
    for lesson in lessons:
        there = places_that_count(lesson)
        hits = np.asarray(gather(_hits(target, pupil, on_devices(target, lesson), depths)))
        right, places = right + int(np.sum((hits > 0) & there[:, :-1])), places + int(there.sum())
        for row, accepted in enumerate(hits):
            for begin, end in answers(there[row]):
                tokens += end - begin
                passes += walk(accepted[begin:end])
    return Served(tokens, passes, right / max(places, 1))


def on_devices(target: Target | None, rows: PyTree) -> PyTree:
    """Rows where the target's mesh has them, if it is spread over one."""
    mesh = None if target is None else target.model.mesh
    return rows if mesh is None else place(rows, mesh, "data")


def walk(accepted: Sequence[int]) -> int:
    """Passes that a text takes, of which the round from its i-th token accepts so many."""
    at = passes = 0
    while at < len(accepted):
        at += int(accepted[at]) + 1
        passes += 1
    return passes


def answers(there: np.ndarray) -> Iterable[tuple[int, int]]:
    """Runs of True in bool[T], as (begin, end): the places from which an answer is drafted."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], there, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


@functools.partial(jax.jit, static_argnames="depths")
def _hits(target: Target, pupil: Pupil, lesson: Lesson, depths: int) -> Array:
    """int32[B, T - 1], from every place."""
    return learner_of(pupil).leading(pupil.params, target, lesson, depths)
