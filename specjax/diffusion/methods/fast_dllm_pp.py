"""Fast-dLLM++: the largest number of columns that are jointly likeliest under any dependence between them.

Kasa, Dai, Negi, Li: Fast-dLLM++: Fréchet Profile Decoding for Faster Diffusion LLM Inference (2026), arXiv 2606.02955.

Rule: sort the confidences of the eligible columns, c_1 >= c_2 >= ... L_n = max(0, 1 - sum_{j<=n} (1 - c_j)) is the
lower bound of the joint probability of the first n. U_n = 1 - c_n is the upper bound of any other choice. Take n =
max{n : L_n - U_n > delta} columns, at least one. L_n - U_n falls with n, so it suffices to count.
Guarantee: lossy. With delta >= 0 and greedy proposals, the columns after the first are the single likeliest choice
under every joint law with these marginals. It takes at least the columns of the factor rule with f = 1 - delta. With
equal confidences it takes as many. delta >= 1 is one column a pass.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.types import Array

METHOD = Method(
    name="fast_dllm_pp",
    kind="diffusion",
    guarantee="lossy",
    summary="decides as many columns as are jointly most likely under any dependence between them",
    paper="Kasa et al. 2026, arXiv 2606.02955",
    options=(
        shared.BLOCK,
        Option("delta", "float", 0.25, "margin of the decided tokens over the others"),
    ),
)


@checked
def fast_dllm_pp(denoiser: Denoiser, *, block: int | None = 32, delta: float = 0.25) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. delta: minimum gap between the bounds of a
    taken column.
    """
    return Procedure(blocks(denoiser.block or block), frechet(delta))


@functools.cache
def frechet(delta: float) -> ColumnRule:
    """Return a rule that takes the columns with a gap between the bounds above `delta`."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        sure = measures.confidence(proposal)
        doubt = 1 - measures.sort_descending(sure, view.eligible, behind=0.0)
        lower, other = jnp.maximum(0, 1 - jnp.cumsum(doubt, 1)), doubt
        count = jnp.maximum(jnp.sum(lower - other > delta, 1, dtype=jnp.int32), 1)
        return measures.top(sure, view.eligible, count), proposal.token, state

    return ColumnRule(select)
