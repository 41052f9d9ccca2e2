"""Greedy verification: follow the target's argmax through the tree.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2023), arXiv 2211.17192; for trees
Miao et al., SpecInfer (2024), arXiv 2305.09781.

Rule: at node i the target's token is argmax_v logits[i, v] (ties: lowest id); descend while it is a child.
Guarantee: greedy. The text is that of greedy decoding, for any draft.
"""

from __future__ import annotations

from specjax.types import Array, TokenTree, Verdict
from specjax.verifiers.node_logits import NodeLogits, largest_of
from specjax.verifiers.verifier import ANY, Verifier
from specjax.verifiers.walk import walk


def _rule(keys: Array, tree: TokenTree, target_logits: Array | NodeLogits) -> Verdict:
    del keys  # nothing is drawn
    return walk(tree, lambda node: largest_of(target_logits, node))


greedy = Verifier(
    "greedy",
    _rule,
    draws=ANY,
    guarantee="greedy",
    summary="follows the target's argmax through the tree",
    paper="Leviathan et al. 2023, arXiv 2211.17192",
    by_row=True,
)
