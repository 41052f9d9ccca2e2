"""The threshold rule, which decides every column with enough confidence.

Wu et al.: Fast-dLLM (2025), arXiv 2505.22618, `threshold`; Cheng et al.: SDAR (2025), arXiv 2510.06303, `dynamic`.

Rule: take the eligible columns with confidence >= tau. If these are fewer than the minimum number of columns, take the
most confident ones instead, as many as that minimum. The minimum is one, so that every pass makes progress, or the
quota of the schedule.
Guarantee: lossy: the columns of a pass are decided as if they were independent. tau > 1 is the quota rule.
Deviations: the test is >= as in Fast-dLLM; SDAR's release uses >.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.diffusion import measures
from specjax.diffusion.types import ColumnRule, Proposal, View
from specjax.types import Array


@functools.cache
def threshold(tau: float = 0.9, *, min_columns: int | None = 1) -> ColumnRule:
    """Return the threshold rule. tau: confidence at which a column is taken. min_columns: minimum number of taken
    columns; None: the schedule's quota.
    """

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        count = jnp.maximum(quota, 1) if min_columns is None else jnp.full_like(quota, min_columns)
        return sure_enough(proposal, view, tau, count), proposal.token, state

    return ColumnRule(select)


def sure_enough(proposal: Proposal, view: View, tau: float | Array, count: Array) -> Array:
    """Return bool[B, W]: eligible columns with confidence >= tau, or the `count` [B] most confident if these are fewer.

    tau: float32[] or [B, 1].
    """
    sure = measures.confidence(proposal)
    high = view.eligible & (sure >= tau)
    enough = jnp.sum(high, 1) >= count
    return jnp.where(enough[:, None], high, measures.top(sure, view.eligible, count))
