"""Exact speculative sampling over chains and over trees whose siblings were drawn without replacement.

Chains: Leviathan, Kalman, Matias (2023), arXiv 2211.17192; Chen et al. (2023), arXiv 2302.01318. Trees: Jeon et al.,
Recursive Speculative Decoding (2024), arXiv 2402.14160. A chain is the tree with one child per node,
so one scan serves.

Rule at a node with children x_1 ... x_m in draft order, r <- p, d <- q:
  accept x_j if u_j d(x_j) < r(x_j), then r <- p, d <- q of x_j;
  else r <- norm([r - d]+), then d(x_j) <- 0, d <- norm(d).
When no child is left the next token is drawn from r.
Guarantee: distribution. Nodes are visited once in index order, parents before children, siblings in draft order.
Deviation: a drafted token with d(x) = 0 (mismatched warping) is rejected and leaves r as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.sampling import draw
from specjax.types import Array, TokenTree, Verdict


class Descent(NamedTuple):
    """State of the scan."""

    node: Array  # int32[B], whose children are being tested
    residual: Array  # float32[B, V], r
    draft: Array  # float32[B, V], d
    path: Array  # int32[B, N]
    num_nodes: Array  # int32[B], of `path`


def speculative_sampling(keys: Array, tree: TokenTree, target_logits: Array) -> Verdict:
    """See the module."""
    n = tree.tokens.shape[1]
    accept = jax.vmap(jax.vmap(lambda key, node: jax.random.uniform(jax.random.fold_in(key, node))), (0, None))
    end = descend(accept(keys, jnp.arange(1, n + 1)), tree, target_logits)
    row = jnp.arange(end.node.shape[0])
    return Verdict(end.path, end.num_nodes, draw(keys[row, end.node], jnp.log(end.residual)))


def descend(u: Array, tree: TokenTree, target_logits: Array) -> Descent:
    """The rule with its uniforms `u` float32[B, N] given (u[:, 0] is not used); the next token has law `residual`."""
    batch, n = tree.tokens.shape
    if tree.logits is None:
        raise ValueError("speculative sampling needs the draft's logits; use sample_and_match for point-mass trees")

    def row(logits, node):
        return jax.nn.softmax(jnp.take_along_axis(logits, node[:, None, None], 1)[:, 0], -1)

    def body(i, s: Descent) -> Descent:
        token = tree.tokens[:, i]
        at = lambda law: jnp.take_along_axis(law, token[:, None], 1)[:, 0]
        hit = tree.valid[:, i] & (tree.parents[:, i] == s.node)
        d = at(s.draft)
        accepted = hit & (d > 0) & (u[:, i] * d < at(s.residual))
        rejected = hit & (d > 0) & ~accepted
        here = jnp.full((batch,), i, jnp.int32)
        without = jnp.where(jnp.arange(s.draft.shape[1]) == token[:, None], 0.0, s.draft)
        residual = jnp.where(
            rejected[:, None], _normalise(jnp.maximum(s.residual - s.draft, 0.0), s.residual), s.residual
        )
        draft = jnp.where(rejected[:, None], _normalise(without, without), s.draft)
        return Descent(
            node=jnp.where(accepted, i, s.node),
            residual=jnp.where(accepted[:, None], row(target_logits, here), residual),
            draft=jnp.where(accepted[:, None], row(tree.logits, here), draft),
            path=jnp.where(accepted[:, None] & (jnp.arange(n) == s.num_nodes[:, None]), i, s.path),
            num_nodes=s.num_nodes + accepted,
        )

    root = jnp.zeros((batch,), jnp.int32)
    path = jnp.full((batch, n), -1, jnp.int32).at[:, 0].set(0)
    start = Descent(root, row(target_logits, root), row(tree.logits, root), path, jnp.ones((batch,), jnp.int32))
    return jax.lax.fori_loop(1, n, body, start) if n > 1 else start


def _normalise(x: Array, fallback: Array) -> Array:
    """x / sum(x), or `fallback` where nothing is left (p = q to rounding, or an exhausted draft)."""
    total = jnp.sum(x, -1, keepdims=True)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1.0), fallback)
