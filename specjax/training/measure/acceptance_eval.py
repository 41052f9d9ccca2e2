"""Measurement of the tokens per target pass of a draft head or draft model, without decoding.

A greedy draft equals the text up to its first error. The round from position t therefore accepts as many tokens as the
training pass predicts correctly from t on. Greedy decoding moves from t to t + accepted + 1. A walk over the text with
the same steps visits exactly the rounds of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specjax.arrays.modes import jit, with_standard_modes
from specjax.numerics.global_arrays import gather, place
from specjax.training.data.packing import PackedBatch, TrainingText, find_round_starts, pack
from specjax.training.objectives.trainables import Trainable, build_objective
from specjax.types import Array, PyTree, Target


class MeasuredAcceptance(NamedTuple):
    """Number of target passes that a greedy chain needs for some texts. Bonus tokens count as tokens."""

    tokens: int
    passes: int
    first: float  # share of all positions at which the first drafted token is correct

    @property
    def per_pass(self) -> float:
        """Return the tokens per target pass."""
        return self.tokens / max(self.passes, 1)


@with_standard_modes
def measure_acceptance(
    target: Target, trainable: Trainable, texts: Sequence[TrainingText], *, depths: int, rows: int, length: int
) -> MeasuredAcceptance:
    """Measure a chain of `depths` drafted tokens on texts that the target wrote greedily.

    Args: rows, length: shape of the passes. Longer texts are cut at `length`.
    """
    tokens = passes = correct = positions = 0
    for packed in pack(texts, rows, length):
        starts = find_round_starts(packed)
        hits = np.asarray(gather(_leading_hits(target, trainable, place_batch(target, packed), depths)))
        correct, positions = correct + int(np.sum((hits > 0) & starts[:, :-1])), positions + int(starts.sum())
        for row, accepted in enumerate(hits):
            for begin, end in find_runs(starts[row]):
                tokens += end - begin
                passes += count_passes(accepted[begin:end])
    return MeasuredAcceptance(tokens, passes, correct / max(positions, 1))


def place_batch(target: Target | None, batch: PyTree) -> PyTree:
    """Split the rows of a batch over the target's mesh, if it has one."""
    mesh = None if target is None else target.model.mesh
    return batch if mesh is None else place(batch, mesh, "data")


def count_passes(accepted: Sequence[int]) -> int:
    """Count the target passes for a text. The round from its i-th token accepts `accepted[i]` tokens."""
    at = passes = 0
    while at < len(accepted):
        at += int(accepted[at]) + 1
        passes += 1
    return passes


def find_runs(mask: np.ndarray) -> Iterable[tuple[int, int]]:
    """Return the runs of True in bool[T] as pairs (begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


@jit(static_argnames="depths")
def _leading_hits(target: Target, trainable: Trainable, packed: PackedBatch, depths: int) -> Array:
    """Return int32[B, T - 1]: the number of correct leading tokens of the draft from every position."""
    return build_objective(trainable).leading_hits(trainable.params, target, packed, depths)
