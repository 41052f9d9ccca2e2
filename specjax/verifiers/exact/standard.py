"""Standard speculative sampling of a chain.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (ICML 2023), arXiv 2211.17192;
Chen et al.: Accelerating Large Language Model Decoding with Speculative Sampling (2023), arXiv 2302.01318.

Rule: accept x_i while u_i q_i(x_i) < p_i(x_i). After the first rejection the next token is drawn from
norm([p_i - q_i]+), after the last acceptance from p.
Guarantee: distribution. All positions are tested in parallel; only two rows of V are read in full. If the logits are
too large to be stored, they are tested in turn, with the rows of one position at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.types import Array, TokenTree
from specjax.verifiers.descent import WITHOUT_REPLACEMENT, descend
from specjax.verifiers.node_logits import NodeLogits, all_rows, are_stored
from specjax.verifiers.verifier import Accepted, Verifier, distribution, need_logits, residual, with_keys


def core(u: Array, tree: TokenTree, target_logits: Array | NodeLogits) -> Accepted:
    """Apply the rule with given uniforms float32[B, N]. `tree` is a chain, and u[:, 0] is not used."""
    n, draft_logits = tree.tokens.shape[1], need_logits(tree)
    if not (are_stored(target_logits) and are_stored(draft_logits)):
        return descend(WITHOUT_REPLACEMENT, u, tree, target_logits)
    target_logits, draft_logits = all_rows(target_logits), all_rows(draft_logits)
    p, q = (drafted_log_probability(logits, tree) for logits in (target_logits, draft_logits))
    ok = tree.valid[:, 1:] & (q > -jnp.inf) & (jnp.log(u[:, 1:]) + q < p)
    num_nodes = 1 + jnp.sum(jnp.cumprod(ok, 1, dtype=jnp.int32), 1)
    last = num_nodes - 1
    return Accepted(
        chain_path(num_nodes, n), num_nodes, residual_of_chain(tree, last, distribution(target_logits, last))
    )


def drafted_log_probability(logits: Array, tree: TokenTree) -> Array:
    """Return the log-probability float32[B, N - 1] of each drafted token of a chain, -inf where it cannot be drawn."""
    following = jnp.roll(tree.tokens, -1, 1)[:, :, None]
    logit = jnp.take_along_axis(logits, following, 2)[:, :, 0]
    return jnp.where(logit > -jnp.inf, logit - jax.nn.logsumexp(logits, -1), -jnp.inf)[:, :-1]


def chain_path(num_nodes: Array, n: int) -> Array:
    """Return int32[B, N]: 0 ... num_nodes - 1, then -1."""
    return jnp.where(jnp.arange(n) < num_nodes[:, None], jnp.arange(n, dtype=jnp.int32), -1)


def residual_of_chain(tree: TokenTree, last: Array, p: Array) -> Array:
    """Return the distribution of the next token: p [B, V], minus q of node `last` [B] if a child of it was drafted."""
    valid = jnp.pad(tree.valid, ((0, 0), (0, 1)))
    drafted = take_along(valid, last[:, None] + 1, 1)
    q = distribution(need_logits(tree), last)
    rejected = take_along(jnp.pad(tree.tokens, ((0, 0), (0, 1))), last[:, None] + 1, 1)
    has_mass = jnp.take_along_axis(q, rejected, 1) > 0  # a drafted token without mass leaves p unchanged
    return residual(p, jnp.where(drafted & has_mass, q, 0.0))


def chain_logits(tree: TokenTree, vocab: int) -> Array:
    """Return the logits of a chain. A greedy draft omits them, so they are one-hot logits of its tokens."""
    if tree.logits is not None:
        return all_rows(tree.logits)
    return jnp.where(jnp.arange(vocab) == jnp.roll(tree.tokens, -1, 1)[:, :, None], 0.0, -jnp.inf)


standard = Verifier(
    "standard",
    with_keys(core),
    draws=("chain",),
    guarantee="distribution",
    summary="accepts a chain token by token with probability min(1, p/q)",
    paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
    by_row=True,
)
