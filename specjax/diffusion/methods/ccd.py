"""CCD: a rule that decides columns that were candidates in two consecutive passes with the same token.

Chen et al.: Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (2025), arXiv 2512.02044;
the rule is that of the release.

Rule: columns are ranked by -H(p), the most confident first. The candidates of a pass are the V top-ranked columns. V
starts at 1 and grows by one per pass up to `candidates`. It returns to 1 once a tenth or less of the block is masked.
R are the columns that are candidates in this pass and the previous one, with the same most likely token. If the
top-ranked column was a candidate of the previous pass, decide all of R (`dynamic`) or the most confident of R.
Otherwise, and in the first `warmup` passes of a block, decide the top-ranked column alone.
Guarantee: lossy; candidates = 1 is one column a pass by entropy.
Deviations: if R is empty because the top column had another token before, that column is still decided. The history
restarts in every block. The paper's other form, thresholds on the average of d distributions, is not implemented.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import first_largest
from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Canvas, ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array, PyTree

METHOD = Method(
    name="ccd",
    kind="diffusion",
    guarantee="lossy",
    summary="decides columns that were candidates with the same token in the previous pass too",
    paper="Chen et al. 2025, arXiv 2512.02044",
    options=(
        shared.BLOCK,
        Option("candidates", "int", 5, "candidate columns per pass"),
        Option("warmup", "int", 5, "first passes per block that decide one column each"),
        Option("dynamic", "yes_or_no", True, "decide all coherent columns instead of one"),
    ),
)


@checked
def ccd(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    candidates: int = 5,
    warmup: int = 5,
    dynamic: bool = True,
) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. candidates: maximum candidates of a pass.
    warmup: first passes of a block, which decide one column each. dynamic: decide all coherent columns instead of one.
    """
    return Procedure(blocks(denoiser.block or block), coherent(candidates, warmup, dynamic))


class State(NamedTuple):
    named: Array  # bool[B, W], candidates of the previous pass
    word: Array  # int32[B, W], their most likely tokens
    passes: Array  # int32[B], passes over this block
    masks: Array  # int32[B], columns of this block that were masked when it was entered


@functools.cache
def coherent(candidates: int, warmup: int, dynamic: bool) -> ColumnRule:
    """Return the rule of CCD.

    Raises: UsageError for numbers that are too small.
    """
    if candidates < 1 or warmup < 0:
        raise UsageError(f"candidates must be at least 1 and warmup at least 0, not {candidates} and {warmup}")

    def init(params: PyTree, canvas: Canvas, width: int, vocab: int) -> State:
        batch = len(canvas.tokens)
        nothing = jnp.zeros((batch,), jnp.int32)
        return State(jnp.zeros((batch, width), bool), jnp.zeros((batch, width), jnp.int32), nothing, nothing)

    def select(params: PyTree, state: State, proposal: Proposal, view: View, quota: Array):
        entered, eligible = view.entered, view.eligible
        left = jnp.sum(view.open, 1, dtype=jnp.int32)
        masks = jnp.where(entered, left, state.masks)
        passes = jnp.where(entered, 0, state.passes)
        previous = state.named & ~entered[:, None]
        order = measures.rank(-measures.entropy(proposal.logits), eligible)
        word = first_largest(proposal.logits)
        size = jnp.where(10 * left <= masks, 1, jnp.minimum(passes + 1, candidates))
        named = eligible & (order < size[:, None])
        surest = eligible & (order == 0)
        again = named & previous & (word == state.word)
        first = again & (order == jnp.min(jnp.where(again, order, order.shape[1]), 1, keepdims=True))
        previous_candidates = jnp.any(surest & previous, 1) & jnp.any(again, 1) & (passes >= warmup)
        take = jnp.where(previous_candidates[:, None], again if dynamic else first, surest)
        return take, proposal.token, State(named, word, passes + jnp.any(eligible, 1), masks)

    return ColumnRule(select, init)
