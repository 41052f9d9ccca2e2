"""Sequential temperature scaling of a head's confidence (DSpark, DeepSeek 2026, github.com/deepseek-ai/DeepSpec).

Rule: the confidence of slot k is c_k = sigmoid(z_k / T_k). From left to right, T_k minimises the expected calibration
error of c_1 ... c_k as a prediction that the first k tokens are all accepted. Earlier temperatures are fixed then.
The order of positions by the confidence of a slot is unchanged. Decoding stays as exact as before.
Deviation: the grid and the number of bins are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit, with_standard_modes
from specjax.models.heads.contract import DraftHead
from specjax.numerics.global_arrays import gather
from specjax.training.data.packing import PackedBatch, TrainingText, find_round_starts, pack
from specjax.training.measure.acceptance_eval import find_runs, place_batch
from specjax.training.objectives.trainables import build_objective, chain_confidence
from specjax.types import Array, Target

GRID = np.sort(np.concatenate([[1.0], np.geomspace(0.2, 5.0, 40)]))
BINS = 15


def has_temperatures(head: object) -> bool:
    """Return True for a draft head with a confidence that can be scaled."""
    return isinstance(head, DraftHead) and "temperatures" in head.params.get("confidence", {})


@with_standard_modes
def scale_confidence(
    target: Target, head: DraftHead, texts: Sequence[TrainingText], *, rows: int, length: int, temperature: float = 0.0
) -> DraftHead:
    """Return the head with the temperatures that fit texts of the target, or the head itself if none fits a pass.

    Args: rows, length, temperature: as in `measure_acceptance`.
    """
    slots = head.params["confidence"]["temperatures"].shape[0]
    head = _with_temperatures(head, np.ones(slots, np.float32))
    logits, accepted, written = [], [], []
    for packed in pack(texts, rows, length):
        starts = find_round_starts(packed)
        batch = place_batch(target, packed)
        chances, confidence = (np.asarray(gather(x)) for x in _rounds(target, head, batch, slots, float(temperature)))
        for row in range(len(starts)):
            for begin, end in find_runs(starts[row]):
                accepted.append(chances[row, begin:end])
                logits.append(confidence[row, begin:end])
                written.append(np.arange(begin, begin + len(accepted[-1]))[:, None] + np.arange(slots) < end)
    if not logits:
        return head
    return _with_temperatures(head, fit_temperatures(*map(np.concatenate, (logits, accepted, written))))


def _with_temperatures(head: DraftHead, temperatures: np.ndarray) -> DraftHead:
    confidence = head.params["confidence"] | {"temperatures": jnp.asarray(temperatures, jnp.float32)}
    return replace(head, params=head.params | {"confidence": confidence})


@jit(static_argnames=("slots", "temperature"))
def _rounds(
    target: Target, head: DraftHead, packed: PackedBatch, slots: int, temperature: float
) -> tuple[Array, Array]:
    """Return float32[B, T - 1, K] each: acceptance and the logit of the confidence, from every position."""
    accepted = build_objective(head).acceptance(head.params, target, packed, slots, temperature)
    chance = jnp.clip(chain_confidence(head, target, packed, slots), 1e-6, 1 - 1e-6)
    return accepted, jnp.log(chance) - jnp.log1p(-chance)


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray, written: np.ndarray) -> np.ndarray:
    """Return the temperatures float32[K].

    Args:
      logits: float[P, K], z of P rounds. accepted: float[P, K], acceptance of each token if all before it are accepted.
      written: bool[P, K], True where the text has the token. The other tokens do not count.
    """
    temperatures = np.ones(logits.shape[1], np.float32)
    predicted, prefix = np.ones(len(logits)), np.ones(len(logits))
    for k in range(logits.shape[1]):
        prefix = prefix * accepted[:, k]
        counted = written[:, k]
        if not counted.any():
            break
        by_temperature = predicted[:, None] / (1 + np.exp(-np.clip(logits[:, k, None] / GRID, -60, 60)))  # [P, grid]
        errors = [calibration_error(column[counted], prefix[counted]) for column in by_temperature.T]
        ties = np.flatnonzero(np.isclose(errors, min(errors), rtol=0, atol=1e-12))
        best = ties[np.argmin(np.abs(np.log(GRID[ties])))]  # of equal ones, the closest to 1
        temperatures[k], predicted = GRID[best], by_temperature[:, best]
    return temperatures


def calibration_error(predicted: np.ndarray, accepted: np.ndarray, bins: int = BINS) -> float:
    """Return the expected calibration error of predictions float[P] of outcomes float[P], in bins of equal width."""
    place = np.minimum((predicted * bins).astype(int), bins - 1)
    gaps = np.bincount(place, predicted - accepted, bins)
    return float(np.abs(gaps).sum() / len(predicted))
