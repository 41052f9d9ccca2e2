"""AdaBlock-dLLM: blocks with adaptive sizes that end where the model predicts a line break.

Lu, Chen, Karashima, Wang, Fujiki, Fan: AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size
(2025), arXiv 2509.26432.

Rule: a block starts at the first masked column. Its first pass looks at the next `ahead` columns. Among those whose
most likely token is a delimiter, d is the most confident column. If its confidence is at least `delimiter_tau`, the
block ends with column d, otherwise after `block` columns. The threshold rule decides the block, from that pass on.
Guarantee: lossy; delimiter_tau > 1 is the threshold rule with blocks of `block`.
Deviations: `ahead` is a number of columns, not a quarter of the new text (the paper's quarter is 128 of 512). A row
enters its next block as soon as its last one is finished, without waiting for other rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.catalog import Method, Option, shared
from specjax.diffusion.measures import probability
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Proposal, Schedule, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="adablock",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all confident columns of blocks that end at predicted line breaks",
    paper="Lu et al. 2025, arXiv 2509.26432",
    options=(
        shared.BLOCK,
        shared.tau(0.9),
        Option("delimiters", "integers", (198,), "ids of tokens that may end a block"),
        Option("delimiter_tau", "float", 0.3, "confidence at which a delimiter ends the block"),
        Option("ahead", "int", 128, "columns that are searched for a delimiter"),
    ),
)


@checked
def adablock(
    denoiser: Denoiser,
    *,
    block: int = 32,
    tau: float = 0.9,
    delimiters: tuple[int, ...] = (198,),
    delimiter_tau: float = 0.3,
    ahead: int = 128,
) -> Procedure:
    """Return the procedure.

    Args:
      block: columns of a block without a delimiter. tau: confidence at which a column is decided.
      delimiters: tokens that may end a block (default: LLaDA's newline).
      delimiter_tau: minimum confidence of a delimiter. ahead: columns that are searched for one.

    Raises: UsageError for a block-causal model, which has fixed blocks.
    """
    if denoiser.is_causal:
        raise UsageError("adablock selects block sizes, and a block-causal model has a fixed one; choose method sdar")
    return Procedure(delimited(block, tuple(delimiters), delimiter_tau, ahead), threshold(tau))


class State(NamedTuple):
    start: Array  # int32[B], first column of the block
    end: Array  # int32[B], column after the block


@functools.cache
def delimited(block: int, delimiters: tuple[int, ...], tau: float, ahead: int) -> Schedule:
    """Return the schedule. Raises: UsageError for numbers below 1, or no delimiters."""
    for name, value in (("block", block), ("ahead", ahead), ("the number of delimiters", len(delimiters))):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")

    def init(params: PyTree, canvas: Canvas, width: int) -> State:
        return State(canvas.start, canvas.start)

    def place(state: State, canvas: Canvas) -> tuple[Array, State]:
        start = jnp.where(canvas.first_open < state.end, state.start, canvas.first_open)
        return start, state._replace(start=start)

    def bound(state: State, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, State]:
        best = first_largest(proposal.logits)
        near = view.open & (jnp.arange(best.shape[1]) < ahead)
        ends = near & jnp.any(best[..., None] == jnp.array(delimiters), -1)
        sure = jnp.where(ends, probability(proposal.logits, best), -1.0)
        place = first_largest(sure)
        delimiter_column = take_along(sure, place[:, None], 1)[:, 0] >= tau
        end = state.start + jnp.where(delimiter_column, place + 1, block)
        end = jnp.where(view.entered, jnp.minimum(end, canvas.end), state.end)
        return end, jnp.ones_like(end), state._replace(end=end)

    return Schedule(max(block, ahead), place, bound, init)
