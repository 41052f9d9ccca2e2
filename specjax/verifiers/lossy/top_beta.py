"""Top-beta acceptance: accept tokens among the target's best that are not far behind the very best.

Xia, Ge, Wang, Chen, Wei, Sui: Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
Generation (2022), arXiv 2203.16487; as generalised aggressive decoding (GAD) in Ge, Xia, Sun, Chen, Wei: Lossless
Acceleration for Seq2seq Generation with Aggressive Decoding (2022), arXiv 2205.10350.

Rule: node x below c passes if fewer than beta tokens are likelier than x under p(. | c), and
max log p - log p(x) <= tau. Accept the longest path from the root whose nodes all pass; ties: the larger sum of log p,
then the first node. The next token is the argmax of p.
Guarantee: lossy. With beta = 1 or tau = 0 only the argmax passes (and its ties). Then the text is the greedy one for
any draft and temperature. beta = V with tau = inf accepts the complete draft.
Typical acceptance uses a probability threshold that depends on the entropy. This rule uses a rank, and a threshold that
depends on the best token's probability.
p is the warped distribution. At temperature 0 it is one-hot, and the rule is greedy verification. For the relaxed rule
with greedy text, the setting of the papers, decode at temperature 1.
Deviations: the rank is counted instead of read from a sorted vocabulary, and tokens of equal probability pass or fail
together. On trees, which the papers do not cover, the longest run is taken. After a fully accepted block the target's
own token follows. (The authors draft the next block after it.)
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.types import Array, TokenTree
from specjax.verifiers.lossy.typical import longest_run, node_log_probability
from specjax.verifiers.verifier import ANY, Accepted, Verifier, check_parameter, distribution, with_keys


def core(u: Array, tree: TokenTree, target_logits: Array, *, beta: int | Array, tau: float | Array) -> Accepted:
    """Apply the rule. It does not read the uniforms float32[B, N]."""
    del u
    rank, gap = rank_and_gap(target_logits, tree)
    path, num_nodes, last = longest_run(tree, (rank < beta) & (gap <= tau), node_log_probability(target_logits, tree))
    best = first_largest(distribution(target_logits, last))
    return Accepted(path, num_nodes, jax.nn.one_hot(best, target_logits.shape[-1]))


def rank_and_gap(logits: Array, tree: TokenTree) -> tuple[Array, Array]:
    """Return the rank int32[B, N] of each node's token below its parent, and its gap float32[B, N] to the best token.

    The rank is the number of likelier tokens, and the gap is in nats. The root's entries are undefined.
    """
    parent_logits = take_along(
        logits, jnp.maximum(tree.parents, 0)[:, :, None], 1
    )  # fused into the comparison, not stored
    logit = jnp.take_along_axis(parent_logits, tree.tokens[:, :, None], 2)
    return jnp.sum(parent_logits > logit, -1, dtype=jnp.int32), jnp.max(parent_logits, -1) - logit[:, :, 0]


@functools.cache
def top_beta(beta: int = 5, tau: float = 3.0) -> Verifier:
    """Build the rule for any tree, with the authors' defaults (batches of 32).

    Raises: UsageError for beta < 1 or tau < 0, with which no token could ever pass.
    """
    check_parameter("top_beta: beta", beta, lambda x: x >= 1, "at least 1, which accepts the argmax only")
    check_parameter("top_beta: tau", tau, lambda x: x >= 0, "at least 0, which accepts the argmax only")
    return Verifier(
        "top_beta",
        with_keys(functools.partial(core, beta=beta, tau=tau)),
        draws=ANY,
        guarantee="lossy",
        summary="accepts tokens among the target's best that are not far behind the best",
        paper="Xia et al. 2022, arXiv 2203.16487",
        greedy_at_zero=beta == 1 or tau < math.inf,
    )
