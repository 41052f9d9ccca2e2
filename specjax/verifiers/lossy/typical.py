"""Typical acceptance: accept tokens that are not improbable under the target.

Cai, Li, Geng, Peng, Lee, Chen, Dao: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads
(ICML 2024), arXiv 2401.10774.

Rule: node x below c passes if p(x | c) > min(epsilon, delta exp(-H(p(. | c)))), H in nats. Accept the longest path from
the root whose nodes all pass; ties: the larger sum of log p, then the first node. The next token is drawn from p.
Guarantee: lossy; no accepted token is improbable under the target. At temperature 0 only the argmax passes (for epsilon
or delta below 1), so the text is the greedy one. If the threshold is 1 or more (epsilon >= 1, delta >= V), no token
passes, which is plain decoding. A larger threshold is stricter, and 0 accepts every token that p can draw.
Only the draw of the next token is random. p is the warped distribution, at the temperature of the call.
Deviations: the entropy is exact with 0 log 0 = 0, while the official code adds 1e-5 inside the logarithm. The next
token is drawn from p, while the official code may truncate p once more.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.numerics.sampling import entropy
from specjax.trees import operations
from specjax.types import Array, TokenTree
from specjax.verifiers.verifier import ANY, Accepted, Verifier, check_parameter, distribution, with_keys


def core(u: Array, tree: TokenTree, target_logits: Array, *, epsilon: float, delta: float) -> Accepted:
    """Apply the rule. It does not read the uniforms float32[B, N]."""
    del u
    log_p = node_log_probability(target_logits, tree)
    threshold = take_along(_log_threshold(target_logits, epsilon, delta), jnp.maximum(tree.parents, 0), 1)
    path, num_nodes, last = longest_run(tree, log_p > threshold, log_p)
    return Accepted(path, num_nodes, distribution(target_logits, last))


def _log_threshold(logits: Array, epsilon: float, delta: float) -> Array:
    """Return float32[B, N]: the threshold for the log-probability of a child of each node."""
    log_p = jax.nn.log_softmax(logits, -1)
    return jnp.minimum(jnp.log(epsilon), jnp.log(delta) - entropy(log_p))


def node_log_probability(logits: Array, tree: TokenTree) -> Array:
    """Return log p float32[B, N] of each node's token below its parent: -inf if it cannot be drawn; the root's is 0."""
    parents = jnp.maximum(tree.parents, 0)
    logit = logits[jnp.arange(tree.tokens.shape[0])[:, None], parents, tree.tokens]
    total = take_along(jax.nn.logsumexp(logits, -1), parents, 1)
    log_p = jnp.where(logit > -jnp.inf, logit - total, -jnp.inf)
    return jnp.where(jnp.arange(tree.tokens.shape[1]) == 0, 0.0, log_p)


def longest_run(tree: TokenTree, passes: Array, log_p: Array) -> tuple[Array, Array, Array]:
    """Find the longest path from the root whose nodes all pass; ties: the larger sum of log_p, then the first node.

    Args:
      passes: bool[B, N]; the root always passes. log_p: float32[B, N].

    Returns: path int32[B, N], its number of nodes int32[B] and its last node int32[B].
    """
    is_root = jnp.arange(tree.tokens.shape[1]) == 0
    on_path = operations.ancestor_mask(tree.parents)  # bool[B, N, N], including the node itself
    ok = tree.valid & jnp.all(~on_path | (passes | is_root)[:, None], -1)
    depth = jnp.where(ok, jnp.sum(on_path, -1), 0)
    longest = ok & (depth == jnp.max(depth, 1, keepdims=True))
    total = jnp.sum(jnp.where(on_path, log_p[:, None], 0.0), -1)
    total = jnp.maximum(total, jnp.finfo(total.dtype).min)  # -inf marks the other nodes
    last = jnp.argmax(jnp.where(longest, total, -jnp.inf), 1).astype(jnp.int32)
    return *operations.path_to(tree.parents, last), last


@functools.cache
def typical(epsilon: float = 0.09, delta: float = 0.3) -> Verifier:
    """Build the rule for any tree. The paper sets delta = sqrt(epsilon).

    Raises: UsageError if either is negative or infinite.
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        check_parameter(f"typical: {name}", value, lambda x: (x >= 0) & (x < math.inf), "at least 0 and finite")
    return Verifier(
        "typical",
        with_keys(functools.partial(core, epsilon=epsilon, delta=delta)),
        draws=ANY,
        guarantee="lossy",
        summary="accepts tokens above an entropy-dependent probability threshold",
        paper="Cai et al. 2024, arXiv 2401.10774",
        greedy_at_zero=True,
    )
