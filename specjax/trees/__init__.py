"""Builders of token trees: which tokens a drafter that gives logits drafts, and below which of them it looks."""

from specjax.trees import stops
from specjax.trees.beam import beam
from specjax.trees.chain_with_siblings import chain_with_siblings
from specjax.trees.dyspec import dyspec, dyspec_fixed
from specjax.trees.eagle2 import eagle2
from specjax.trees.grow import Builder, Stop, grow, with_stop
from specjax.trees.paths import from_paths
from specjax.trees.plan import medusa, sequoia
from specjax.trees.spec import FORMS, parse
from specjax.trees.static import branching, builder_of, chain, independent_paths, static

__all__ = [
    "FORMS",
    "Builder",
    "Stop",
    "beam",
    "branching",
    "builder_of",
    "chain",
    "chain_with_siblings",
    "dyspec",
    "dyspec_fixed",
    "eagle2",
    "from_paths",
    "grow",
    "independent_paths",
    "medusa",
    "parse",
    "sequoia",
    "static",
    "stops",
    "with_stop",
]
