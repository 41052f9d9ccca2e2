"""The former name of `specjax.trees.operations` and `specjax.trees.templates`, until the next release."""

import warnings

from specjax.trees.operations import (
    ancestor_mask,
    by_score,
    chain,
    compact,
    cut,
    depths,
    fuse,
    join,
    keep_likely,
    merge_equal_siblings,
    pad_nodes,
    path_to,
    take,
)
from specjax.trees.templates import Template

__all__ = [
    "Template",
    "ancestor_mask",
    "by_score",
    "chain",
    "compact",
    "cut",
    "depths",
    "fuse",
    "join",
    "keep_likely",
    "merge_equal_siblings",
    "pad_nodes",
    "path_to",
    "take",
]

warnings.warn(
    "specjax.tree is now specjax.trees.operations, and its Template is in specjax.trees.templates; import these",
    DeprecationWarning,
    stacklevel=2,
)
