"""Sample and match: the target draws its own token at each node, and the walk continues while the draft contains it.

It is the sampled form of verification for drafts without randomness (n-grams, retrieval, top-k trees). Its distribution
equals that of testing point-mass children in turn with the residual rule (the tree rule of EAGLE-2, Li et al. 2024,
arXiv 2406.16858).

Rule: y_i = argmax_v (log p_i(v) + G(row key, position, v)) with Gumbel noise G; descend while y_i is a child.
The acceptance rate at a node is the target's mass on its children, the best possible for fixed children.
Guarantee: distribution, for point-mass drafts. In addition, the text equals plain sampling with the same keys.
The noise of a position does not depend on the draft. (The rule is also exact for drafts sampled independently of the
noise, but accepts them only with probability sum p q.)
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import Array, TokenTree, Verdict
from specjax.verifiers.node_logits import NodeLogits, draw_of
from specjax.verifiers.verifier import ANY, Verifier
from specjax.verifiers.walk import walk


def _rule(keys: Array, tree: TokenTree, target_logits: Array | NodeLogits) -> Verdict:
    """Warp and draw only at the nodes of the walk: accepted depth + 1 rows of V, instead of N."""

    def choose(node):
        row = jnp.arange(node.shape[0])
        return draw_of(keys[row, node], target_logits, node)

    return walk(tree, choose)


sample_and_match = Verifier(
    "sample_and_match",
    _rule,
    draws=ANY,
    guarantee="distribution",
    summary="the target draws its own token at each node and descends while the tree contains it",
    paper="Li et al. 2024 (EAGLE-2), arXiv 2406.16858",
    by_row=True,
)
