"""Costs of a pass over several tokens, relative to a pass over one token."""

from specjax.costs.curves import (
    Costs,
    Curve,
    RoundedWeights,
    WeightDtype,
    check,
    dtype_of,
    estimated,
    evaluate,
    logits_of,
    measured,
    of_draft,
    planned,
    timed,
)
from specjax.costs.heads import of_head

__all__ = [
    "Costs",
    "Curve",
    "RoundedWeights",
    "WeightDtype",
    "check",
    "dtype_of",
    "estimated",
    "evaluate",
    "logits_of",
    "measured",
    "of_draft",
    "of_head",
    "planned",
    "timed",
]
