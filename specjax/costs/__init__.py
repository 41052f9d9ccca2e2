"""Costs of a pass over several tokens, relative to a pass over one token."""

from specjax.costs.curves import (
    NO_SHARES,
    Costs,
    Curve,
    RoundedWeights,
    Shares,
    WeightDtype,
    added_by_experts,
    check,
    dtype_of,
    estimated,
    evaluate,
    measured,
    of_draft,
    planned,
    shares_of,
    timed,
)
from specjax.costs.drafting import of_drafting
from specjax.costs.experts import active_bytes, expert_share
from specjax.costs.heads import of_head

__all__ = [
    "NO_SHARES",
    "Costs",
    "Curve",
    "RoundedWeights",
    "Shares",
    "WeightDtype",
    "active_bytes",
    "added_by_experts",
    "check",
    "dtype_of",
    "estimated",
    "evaluate",
    "expert_share",
    "measured",
    "of_draft",
    "of_drafting",
    "of_head",
    "planned",
    "shares_of",
    "timed",
]
