"""Fast-dLLM++: the largest set of columns whose tokens are jointly most likely under any dependence between them.

Kasa, Dai, Negi, Li: Fast-dLLM++: Fréchet Profile Decoding for Faster Diffusion LLM Inference (2026), arXiv 2606.02955.

Rule: sort the confidences of the eligible columns, c_1 >= c_2 >= ... The lower bound of the joint probability of the
first n tokens is L_n = max(0, 1 - sum_{j<=n} (1 - c_j)). The upper bound of any other choice is U_n = 1 - c_n. Take
n = max{n : L_n - U_n > delta} columns, at least one. L_n - U_n falls with n, so it suffices to count.
Guarantee: lossy. Let delta >= 0 and the proposals be greedy. The columns after the first are then the single most
likely choice under every joint distribution with these marginals. The rule takes at least the columns of the factor
rule with f = 1 - delta, and as many if the confidences are equal. delta >= 1 is one column a pass.
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
    summary="decides as many columns as their confidences alone prove to be jointly most likely",
    paper="Kasa et al. 2026, arXiv 2606.02955",
    options=(
        shared.BLOCK,
        Option("delta", "float", 0.25, "margin of the decided tokens over the others"),
    ),
)


@checked
def fast_dllm_pp(denoiser: Denoiser, *, block: int | None = 32, delta: float = 0.25) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. delta: gap L_n - U_n that every taken column
    exceeds.
    """
    return Procedure(blocks(denoiser.block or block), frechet(delta))


@functools.cache
def frechet(delta: float) -> ColumnRule:
    """Return a rule that takes the columns with L_n - U_n > `delta`."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        sure = measures.confidence(proposal)
        doubt = 1 - measures.sort_descending(sure, view.eligible, behind=0.0)
        lower, other = jnp.maximum(0, 1 - jnp.cumsum(doubt, 1)), doubt
        count = jnp.maximum(jnp.sum(lower - other > delta, 1, dtype=jnp.int32), 1)
        return measures.top(sure, view.eligible, count), proposal.token, state

    return ColumnRule(select)
