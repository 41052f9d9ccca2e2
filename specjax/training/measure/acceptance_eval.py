"""Measurement of the tokens per target pass of a head or draft model, without decoding.

A draft equals the text up to its first rejection. The training pass over a text therefore computes the drafts of every
round that decoding could begin there. At temperature 0 a draft is accepted if it is the text's token. Greedy decoding
moves from position t to t + accepted + 1, and a walk with the same steps visits exactly its rounds.

At temperature T the target draws the text, and the drafter draws its chain from q. The standard rule accepts a draft x
with probability min(1, q(x) / p(x)), given that the text has x there. Otherwise the text's token comes from the
residual. The rounds are then random, and the expected number of passes follows from the last position backwards:

    E[t] = 1 + sum over j of P(the round from t accepts exactly j drafts) E[t + j + 1]
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
    """Number of target passes that a chain needs for some texts. Bonus tokens count as tokens."""

    tokens: int
    passes: float  # the expected number, if the chain is sampled
    first: float  # mean over all positions of the probability that the first drafted token is accepted

    @property
    def per_pass(self) -> float:
        """Return the tokens per target pass."""
        return self.tokens / max(self.passes, 1)


@with_standard_modes
def measure_acceptance(
    target: Target, trainable: Trainable, texts: Sequence[TrainingText], *, depths: int, rows: int, length: int,
    temperature: float = 0.0,
) -> MeasuredAcceptance:  # fmt: skip
    """Measure a chain of `depths` drafted tokens on texts that the target wrote at this temperature.

    Args: rows, length: shape of the passes. Longer texts are cut at `length`.
    """
    tokens, passes, first, positions = 0, 0.0, 0.0, 0
    for packed in pack(texts, rows, length):
        starts = find_round_starts(packed)
        batch = place_batch(target, packed)
        accepted = np.asarray(gather(_acceptance(target, trainable, batch, depths, float(temperature))), np.float64)
        first, positions = first + float(accepted[..., 0][starts[:, :-1]].sum()), positions + int(starts.sum())
        for row, by_position in enumerate(accepted):
            for begin, end in find_runs(starts[row]):
                tokens += end - begin
                passes += expected_passes(by_position[begin:end])
    return MeasuredAcceptance(tokens, passes, first / max(positions, 1))


def place_batch(target: Target | None, batch: PyTree) -> PyTree:
    """Split the rows of a batch over the target's mesh, if it has one."""
    mesh = None if target is None else target.model.mesh
    return batch if mesh is None else place(batch, mesh, "data")


def expected_passes(accepted: np.ndarray) -> float:
    """Return the expected number of target passes for a text of n tokens.

    Args: accepted: float64[n, K], the probability that the k-th draft of the round from the i-th token is accepted, if
      the earlier ones are.
    """
    count, depths = accepted.shape
    reach = np.cumprod(np.pad(accepted, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0))), 1)
    exactly = reach[:, :-1] - reach[:, 1:]  # [n, K + 1], probability of 0 ... K accepted drafts
    passes = np.zeros(count + depths + 1)
    for i in range(count - 1, -1, -1):
        passes[i] = 1 + exactly[i] @ passes[i + 1 : i + 2 + depths]
    return float(passes[0])


def find_runs(mask: np.ndarray) -> Iterable[tuple[int, int]]:
    """Return the runs of True in bool[T] as pairs (begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


@jit(static_argnames=("depths", "temperature"))
def _acceptance(target: Target, trainable: Trainable, packed: PackedBatch, depths: int, temperature: float) -> Array:
    """Return float32[B, T - 1, K], the acceptance of the drafts from every position."""
    return build_objective(trainable).acceptance(trainable.params, target, packed, depths, temperature)
