"""Block verification: the accepted prefix of a chain is decided jointly, by the product of its probability ratios.

Sun, Ro, Beirami, Suresh: Block Verification Accelerates Speculative Decoding (ICLR 2025), arXiv 2403.10444.

Rule: w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)); h_i = Z_i / (Z_i + 1 - w_i) with
Z_i = sum_x [w_i p_{i+1}(x) - q_{i+1}(x)]+, and h_L = w_L. Accept tau = max {i: u_i < h_i} tokens; a failed test does
not stop the search. The next token is drawn from norm([w_tau p_{tau+1} - q_{tau+1}]+), at tau = L from p.
Guarantee: distribution. It accepts at least as many tokens as the standard rule, and the most possible for one chain.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.types import Array, TokenTree
from specjax.verifiers.exact.standard import chain_path, drafted_log_probability
from specjax.verifiers.node_logits import all_rows
from specjax.verifiers.verifier import Accepted, Verifier, distribution, need_logits, normalise, with_keys


def core(u: Array, tree: TokenTree, target_logits: Array) -> Accepted:
    """Apply the rule with given uniforms float32[B, N]. `tree` is a chain, and u[:, 0] is not used.

    Rows of V are computed one depth at a time, so no array has the size [L, V].
    """
    batch, n = tree.tokens.shape
    draft_logits = all_rows(need_logits(tree))
    p, q = (drafted_log_probability(logits, tree) for logits in (target_logits, draft_logits))
    ratio = jnp.where((p > -jnp.inf) & (q > -jnp.inf), p - q, -jnp.inf)  # log p_i(x_i) / q_i(x_i), [B, L]
    valid = jnp.pad(tree.valid[:, 1:], ((0, 0), (0, 1)))  # bool[B, N]: node i has a drafted child

    def mass(i, log_w):
        """Return [w_i p_{i+1} - q_{i+1}]+, and w_i p_{i+1} where node i has no drafted child."""
        w = jnp.exp(log_w)[:, None]
        drafted = take_along(valid, i[:, None], 1)
        p, q = distribution(target_logits, i), distribution(draft_logits, i)
        return jnp.maximum(w * p - jnp.where(drafted, q, 0.0), 0.0)

    def body(i, carry):
        log_w, tau, log_w_tau = carry
        log_w = jnp.minimum(0.0, log_w + ratio[:, i - 1])
        w, z = jnp.exp(log_w), jnp.sum(mass(jnp.full((batch,), i), log_w), -1)
        better = valid[:, i - 1] & (u[:, i] < acceptance_probability(z, w, valid[:, i]))
        return log_w, jnp.where(better, i, tau), jnp.where(better, log_w, log_w_tau)

    zero = jnp.zeros((batch,))
    start = (zero, zero.astype(jnp.int32), zero)
    _, tau, log_w = jax.lax.fori_loop(1, n, body, start) if n > 1 else start
    return Accepted(chain_path(tau + 1, n), tau + 1, normalise(mass(tau, log_w), distribution(target_logits, tau)))


def acceptance_probability(z: Array, w: Array, drafted: Array) -> Array:
    """Return h_i [B] of Z_i and w_i [B]. Without a drafted child it is exactly w_i."""
    total = z + 1 - w
    return jnp.where(drafted, jnp.where(total > 0, z / jnp.where(total > 0, total, 1.0), 1.0), w)


block = Verifier(
    "block",
    with_keys(core),
    draws=("chain",),
    guarantee="distribution",
    summary="accepts a chain by its joint ratio: never fewer tokens than the standard rule",
    paper="Sun et al. 2025, arXiv 2403.10444",
)
