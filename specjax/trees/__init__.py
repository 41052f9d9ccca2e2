"""Builders of token trees for drafters that return logits. A builder selects the tokens of each level to draft and to
expand.
"""

from specjax.trees import stops
from specjax.trees.builders.beam import beam
from specjax.trees.builders.bild import bild
from specjax.trees.builders.chain_with_siblings import chain_with_siblings
from specjax.trees.builders.ddtree import ddtree, ddtree_auto, drawn_ddtree
from specjax.trees.builders.dyspec import dyspec, dyspec_fixed
from specjax.trees.builders.eagle2 import eagle2
from specjax.trees.builders.static import branching, chain, independent_paths, make_builder, static
from specjax.trees.builders.taps import path_ddtree
from specjax.trees.contracts import Builder, Stop, with_stop
from specjax.trees.growing import grow, read_states
from specjax.trees.parsing import FORMS, inline, parse, parse_paths, static_paths
from specjax.trees.shape_search.best_shapes import medusa, sequoia
from specjax.trees.token_trie import from_paths

__all__ = [
    "FORMS",
    "Builder",
    "Stop",
    "beam",
    "bild",
    "branching",
    "chain",
    "chain_with_siblings",
    "ddtree",
    "ddtree_auto",
    "drawn_ddtree",
    "dyspec",
    "dyspec_fixed",
    "eagle2",
    "from_paths",
    "grow",
    "independent_paths",
    "inline",
    "make_builder",
    "medusa",
    "parse",
    "parse_paths",
    "path_ddtree",
    "read_states",
    "sequoia",
    "static",
    "static_paths",
    "stops",
    "with_stop",
]
