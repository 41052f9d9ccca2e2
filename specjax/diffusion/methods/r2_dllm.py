"""R2-dLLM: the threshold rule with three additional rules for columns that are redundant in space or in time.

Du, Xia, Zhong, Fu, Oswald, Ji, Khailany, Molchanov, Lin: R^2-dLLM: Accelerating Diffusion Large Language Models via
Spatio-Temporal Redundancy Reduction (2026), arXiv 2604.18995.

Rule: first the threshold rule, then three rules. Each one reads the columns that the rules before it did not take:
1. Of three adjacent columns with at most one decided, take the rest if their mean confidence >= `cluster`.
2. Of two or more adjacent columns with the same most likely token, take the most confident, if its confidence >
   `repeat`.
3. Take every column with the same most likely token in the last `times` passes, if its confidence >= `steady`. `over`
   selects the confidence of the last of these passes, their mean, or their maximum.
Guarantee: lossy; with the three thresholds above 1 it is the threshold rule.
Deviations: as in the release, the most confident column is decided before rule 1 runs. The default of rule 3 is the
confidence of the last pass; the release uses the mean. The paper's fine-tuning is not implemented.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest
from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Canvas, ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="r2_dllm",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all confident columns, and those that agree with their neighbours or with earlier passes",
    paper="Du et al. 2026, arXiv 2604.18995",
    options=(
        shared.BLOCK,
        shared.tau(0.9),
        Option("cluster", "float", 0.8, "threshold for the mean confidence of three adjacent columns"),
        Option("repeat", "float", 0.8, "threshold for the most confident of columns with the same token"),
        Option("steady", "float", 0.8, "threshold for a column whose token did not change"),
        Option("times", "int", 3, "minimum number of passes without change"),
        Option("over", ("last", "mean", "max"), "last", "confidence of these passes that is compared"),
    ),
)


TOGETHER = 3
"""Number of columns of a cluster."""

Over = Literal["last", "mean", "max"]


@checked
def r2_dllm(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    tau: float = 0.9,
    cluster: float = 0.8,
    repeat: float = 0.8,
    steady: float = 0.8,
    times: int = 3,
    over: Over = "last",
) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. tau: threshold of the threshold rule. The
    other options belong to the three rules.
    """
    return Procedure(blocks(denoiser.block or block), redundant(tau, cluster, repeat, steady, times, over))


class State(NamedTuple):
    best: Array  # int32[B, W], most likely token in the previous pass; -1: none
    run: Array  # int32[B, W], consecutive passes with this token
    sure: Array  # float32[B, W], sum or maximum of its confidences in these passes


@functools.cache
def redundant(tau: float, cluster: float, repeat: float, steady: float, times: int, over: Over = "last") -> ColumnRule:
    """Return the threshold rule followed by the three rules.

    Raises: UsageError for fewer than one pass, or an unknown criterion.
    """
    if times < 1:
        raise UsageError(f"times must be at least 1, not {times}")
    if over not in ("last", "mean", "max"):
        raise UsageError(f'over must be one of last, mean, max, not "{over}"')
    alone = threshold(tau)

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> State:
        nothing = jnp.zeros((len(canvas.start), width), jnp.int32)
        return State(nothing - 1, nothing, nothing.astype(jnp.float32))

    def select(params, state: State, proposal: Proposal, view: View, quota: Array):
        best = first_largest(proposal.logits)
        largest = measures.apply_weight(proposal, measures.probability(proposal.logits, best))
        take, token, _ = alone.select((), (), proposal, view, quota)
        left = view.eligible & ~take
        take |= left & _clustered(measures.confidence(proposal), left, view, cluster)
        left = view.eligible & ~take
        again = left & _repeated(best, largest, left, repeat)
        left &= ~again
        same = (state.best == best) & (state.run > 0) & ~view.entered[:, None]
        run = jnp.where(same, state.run, 0) + 1
        previous = jnp.where(same, state.sure, 0.0)
        sure = jnp.maximum(previous, largest) if over == "max" else previous + largest
        judged = {"last": largest, "mean": sure / run, "max": sure}[over]
        again |= left & (run >= times) & (judged >= steady)
        output = view.eligible  # columns without a prediction in this pass lose their history
        history = State(jnp.where(output, best, -1), jnp.where(output, run, 0), jnp.where(output, sure, 0.0))
        return take | again, jnp.where(again, best, token), history

    return ColumnRule(select, init)


def _clustered(sure: Array, left: Array, view: View, min_confidence: float) -> Array:
    """Return bool[B, W]: columns of triples that exist, with at least two columns of `left` and a sufficient mean."""
    outside = (~view.exists).astype(jnp.float32)  # columns past the end of the last block
    edge = ((0, 0), (TOGETHER - 1, TOGETHER - 1))

    def over_three(x: Array, function, start: float, **pad) -> Array:
        x = jnp.pad(x, edge, **pad)
        return jax.lax.reduce_window(x, start, function, (1, TOGETHER), (1, 1), "VALID")

    count = over_three(left.astype(jnp.float32), jax.lax.add, 0.0)
    total = over_three(jnp.where(left, sure, 0.0), jax.lax.add, 0.0)
    complete = over_three(outside, jax.lax.max, 0.0, constant_values=1.0) == 0
    good = complete & (count >= TOGETHER - 1) & (total >= min_confidence * count)  # [B, W + 2], by last column
    return jax.lax.reduce_window(good.astype(jnp.int32), 0, jax.lax.max, (1, TOGETHER), (1, 1), "VALID") > 0


def _repeated(best: Array, sure: Array, left: Array, min_confidence: float) -> Array:
    """Return bool[B, W]: the most confident column of each run of equal most likely tokens."""
    goes_on = left[:, 1:] & left[:, :-1] & (best[:, 1:] == best[:, :-1])
    run = jnp.cumsum(jnp.pad(~goes_on, ((0, 0), (1, 0))), 1)
    together = (run[:, :, None] == run[:, None, :]) & left[:, None, :]
    surest = jnp.argmax(jnp.where(together, sure[:, None, :], -jnp.inf), 2)
    return (surest == jnp.arange(best.shape[1])) & (jnp.sum(together, 2) > 1) & (sure > min_confidence)
