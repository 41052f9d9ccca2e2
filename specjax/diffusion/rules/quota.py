"""The quota rule, which decides a scheduled number of columns, the most confident first.

Nie et al.: Large Language Diffusion Models (LLaDA, 2025), arXiv 2502.09992, `low_confidence` and `random`; Cheng et
al.: SDAR (2025), arXiv 2510.06303, `static` and `sequential`.

Rule: the eligible columns with the `quota` largest measures are decided. Ties go to the lower column.
Guarantee: this is the definition that other rules approximate. A quota of one is the quality reference for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from specjax.diffusion import measures
from specjax.diffusion.types import ColumnRule, Proposal, View
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.types import Array

By = Literal[
    "confidence", "warped_confidence", "entropy", "warped_entropy", "margin", "warped_margin", "random", "left_to_right"
]

MEASURES: dict[str, Callable[[Proposal, View], Array]] = {
    "confidence": lambda proposal, view: measures.confidence(proposal),
    "warped_confidence": lambda proposal, view: measures.filtered_confidence(proposal),
    "entropy": lambda proposal, view: -measures.entropy(proposal.logits),
    "warped_entropy": lambda proposal, view: -measures.entropy(proposal.filtered),
    "margin": lambda proposal, view: measures.apply_weight(proposal, measures.margin(proposal.logits)),
    "warped_margin": lambda proposal, view: measures.apply_weight(proposal, measures.margin(proposal.filtered)),
    "random": lambda proposal, view: sampling.uniform(view.rule_keys, 1)[..., 0],
    "left_to_right": lambda proposal, view: -view.columns.astype(jnp.float32),
}
"""Functions that return float32[B, W], by which columns are ranked, the largest first.

"warped" measures use the logits after temperature, top-k, top-p and min-p, where a temperature of 0 counts as 1.
"""


@functools.cache
def quota(by: By = "confidence") -> ColumnRule:
    """Return the quota rule. by: the measure that ranks columns. `confidence` is the probability of the proposed token
    at temperature 1.

    Raises: UsageError for an unknown measure.
    """
    if by not in MEASURES:
        raise UsageError(f'by must be one of {", ".join(MEASURES)}, not "{by}"')
    return quota_of(MEASURES[by])


@functools.cache
def quota_of(measure: Callable[[Proposal, View], Array]) -> ColumnRule:
    """Return the quota rule for a measure float32[B, W] of the columns."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        count = jnp.maximum(quota, 1)
        return measures.top(measure(proposal, view), view.eligible, count), proposal.token, state

    return ColumnRule(select)
