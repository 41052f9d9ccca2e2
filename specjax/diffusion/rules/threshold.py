"""The threshold rule, which decides every column with enough confidence.

Wu et al.: Fast-dLLM (2025), arXiv 2505.22618, `threshold`; Cheng et al.: SDAR (2025), arXiv 2510.06303, `dynamic`.

Rule: take the eligible columns with confidence >= tau, or > tau if the rule is strict. If these are fewer than the
minimum number of columns, take the most confident ones instead, as many as that minimum. The minimum is one, so that
every pass makes progress, or the quota of the schedule. Fast-dLLM's test is >= and reads the probability at temperature
1. SDAR's is strict and reads the probability under the distribution that the token was drawn from.
Guarantee: lossy: the columns of a pass are decided as if they were independent. tau > 1 is the quota rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from specjax.diffusion import measures
from specjax.diffusion.types import ColumnRule, Proposal, View
from specjax.types import Array


@functools.cache
def threshold(
    tau: float = 0.9,
    *,
    min_columns: int | None = 1,
    measure: Callable[[Proposal], Array] = measures.confidence,
    strict: bool = False,
) -> ColumnRule:
    """Return the threshold rule.

    Args:
      tau: confidence at which a column is taken; strict: above which it is taken.
      min_columns: minimum number of taken columns; None: the schedule's quota.
      measure: function that returns the confidences float32[B, W].
    """

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        count = jnp.maximum(quota, 1) if min_columns is None else jnp.full_like(quota, min_columns)
        sure = measure(proposal)
        high = sure > tau if strict else sure >= tau
        return enough_of(high, sure, view, count), proposal.token, state

    return ColumnRule(select)


def enough_of(high: Array, sure: Array, view: View, count: Array) -> Array:
    """Return bool[B, W]: the eligible columns of `high`, or the `count` [B] most confident if these are fewer."""
    high = view.eligible & high
    enough = jnp.sum(high, 1) >= count
    return jnp.where(enough[:, None], high, measures.top(sure, view.eligible, count))
