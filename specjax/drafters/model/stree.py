"""STree: a token tree for a target with state-space layers, verified in one pass without a state per node.

Wu et al.: STree: Speculative Tree Decoding for Hybrid State-Space Models (2025), arXiv 2505.14969.

Rule: a draft model grows a tree by a beam. With the ancestors M of each node and the sums
s = M a of the logarithms of decays, a state-space layer computes

    y_i = exp(s_i) C_i' S_0 + sum_j M_ij exp(s_i - s_j) dt_j (C_i' B_j) x_j + D x_i

for all nodes at once, and the state after an accepted path is a sum over its nodes. The model does this for every
drafter (`specjax.models.hybrid.recurrence`), also in gated delta nets. This method adds the authors' tree.
Guarantee: distribution.
Deviations: the beam is stochastic at temperatures above 0, so that sampled text is exact. The target may also be a
transformer.
"""

from __future__ import annotations

from specjax.catalog import Method, Option
from specjax.drafters.model.two_model import two_model
from specjax.trees import Builder, parse
from specjax.types import Drafter, Target

METHOD = Method(
    name="stree",
    kind="drafter",
    guarantee="distribution",
    summary="drafts a beam of a smaller model for targets with state-space layers, which verify a tree in one pass",
    paper="Wu et al. 2025, arXiv 2505.14969",
    needs=frozenset({"draft"}),
    options=(Option("tree", "tree", "beam:3x4", "tree of the draft model"),),
    arguments=("draft",),
)


def stree(draft: Target, tree: Builder | str = "beam:3x4") -> Drafter:
    """Draft a tree with a draft model, such as a small Mamba-2; the default is the authors' 3 beams of 4 tokens.

    State: that of `two_model`. Raises: UsageError for a text that describes no tree.
    """
    return two_model(draft, tree=parse(tree) if isinstance(tree, str) else tree)
