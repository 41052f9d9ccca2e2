"""Decoding loops that do not draft, verify and commit with a drafter, one published method per file."""

from specjax.decoders.any_subset import AnySubsetModel, AnySubsetResult, any_subset, blank_prompts, load_any_order
from specjax.decoders.ceed_vla import ceed_vla
from specjax.decoders.continuous import ContinuousModel, ContinuousResult, continuous
from specjax.decoders.hamburger import hamburger
from specjax.decoders.lud import lud
from specjax.decoders.pearl import PearlResult, pearl
from specjax.decoders.pearl_in_one_program import pearl_in_one_program
from specjax.decoders.superposed import SuperposedResult, superposed

__all__ = [
    "AnySubsetModel",
    "AnySubsetResult",
    "ContinuousModel",
    "ContinuousResult",
    "PearlResult",
    "SuperposedResult",
    "any_subset",
    "blank_prompts",
    "ceed_vla",
    "continuous",
    "hamburger",
    "load_any_order",
    "lud",
    "pearl",
    "pearl_in_one_program",
    "superposed",
]
