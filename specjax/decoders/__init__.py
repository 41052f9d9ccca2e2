"""Loops that are not draft, verify, commit with a drafter beside the target, one published method per file."""

from specjax.decoders.any_subset import AnySubsetModel, AnySubsetResult, any_subset
from specjax.decoders.continuous import ContinuousModel, ContinuousResult, continuous

__all__ = [
    "AnySubsetModel",
    "AnySubsetResult",
    "ContinuousModel",
    "ContinuousResult",
    "any_subset",
    "continuous",
]
