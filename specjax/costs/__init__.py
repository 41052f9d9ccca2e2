"""What a pass over several tokens costs, in passes over one."""

from specjax.costs.curves import Costs, Curve, at, check, dtype_of, estimated, measured, of_draft, planned, timed
from specjax.costs.heads import of_head

__all__ = [
    "Costs",
    "Curve",
    "at",
    "check",
    "dtype_of",
    "estimated",
    "measured",
    "of_draft",
    "of_head",
    "planned",
    "timed",
]
