"""Costs of a pass over several tokens, relative to a pass over one token."""

from specjax.costs.curves import (
    NO_SHARES,
    Costs,
    Curve,
    RoundedWeights,
    Shares,
    WeightDtype,
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
from specjax.costs.heads import of_head

__all__ = [
    "NO_SHARES",
    "Costs",
    "Curve",
    "RoundedWeights",
    "Shares",
    "WeightDtype",
    "check",
    "dtype_of",
    "estimated",
    "evaluate",
    "measured",
    "of_draft",
    "of_head",
    "planned",
    "shares_of",
    "timed",
]
