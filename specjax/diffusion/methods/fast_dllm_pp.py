"""Fast-dLLM++: as many columns as are the likeliest together under any dependence between them.

Kasa, Dai, Negi, Li: Fast-dLLM++: Fréchet Profile Decoding for Faster Diffusion LLM Inference (2026), arXiv 2606.02955.

Rule: with confidences c_1 >= c_2 >= ... of the eligible columns, L_n = max(0, 1 - sum_{j<=n} (1 - c_j)) is the least
that the n first can have together, U_n = 1 - c_n the most that any other choice can. Take n = max{n : L_n - U_n >
delta} columns, at least one. L_n - U_n falls with n, so that they are counted.
Guarantee: lossy; with delta >= 0 and greedy proposals, what a pass takes beyond the first column is the one likeliest
choice under every joint law with these marginals. It takes all that the factor rule with f = 1 - delta does, and as
many where confidences are equal. delta >= 1 is one column a pass.
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
    """block: columns of a block; None: all new ones. delta: by how much what is taken must be likelier than the
    rest."""
    return Procedure(blocks(denoiser.block or block), frechet(delta))


@functools.cache
def frechet(delta: float) -> ColumnRule:
    """The columns whose gap between the bounds is above `delta`."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        sure = measures.confidence(proposal)
        doubt = 1 - measures.sort_descending(sure, view.eligible, behind=0.0)
        least, other = jnp.maximum(0, 1 - jnp.cumsum(doubt, 1)), doubt
        count = jnp.maximum(jnp.sum(least - other > delta, 1, dtype=jnp.int32), 1)
        return measures.top(sure, view.eligible, count), proposal.token, state

    return ColumnRule(select)
