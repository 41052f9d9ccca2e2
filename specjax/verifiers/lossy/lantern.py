"""LANTERN: interchangeable tokens lend a drafted token their probability.

Jang, Park, Yang, Jung, Yun, Kundu, Kim, Yang: LANTERN: Accelerating Visual Autoregressive Models with Relaxed
Speculative Decoding (ICLR 2025), arXiv 2410.03355; the relative bound is that of LANTERN++ (2025), arXiv 2502.06352.

Rule for a child x of a node with r <- p, d <- q: A is the longest prefix of the tokens nearest to x with
sum_{y in A} r(y) <= delta (relative: <= (lambda - 1) r(x)); r^x(x) = r(x) + sum_A r, r^x = 0 on A, else r.
  accept x if u d(x) < r^x(x), and descend;
  else r <- norm([r^x - d]+), then d(x) <- 0, d <- norm(d); for point masses r <- norm(r^x without x).
When no child is left the next token is drawn from r.
Guarantee: lossy. Each test uses a distribution within total variation delta of the target's; the output can be further
away. delta = 0, lambda = 1 or no neighbours is the exact rule: recursive rejection, on a chain the standard rule.
Deviations: after a rejection only A is taken out, where the released code zeroes all k neighbours; the greedy mode of
the released code (accept x if it is the argmax of r^x) is left out. The surrogate of a later sibling is made from what
the ones before it left. Chains take the same descent as trees.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import Array, TokenTree
from specjax.verifiers.descent import descend, rule_for
from specjax.verifiers.verifier import Accepted, Verifier, with_keys_and_params


def core(
    u: Array, tree: TokenTree, target_logits: Array, neighbours: Array, bound: Array, share: Array, offset: Array
) -> Accepted:
    """The rule with its uniforms float32[B, N] given (u[:, 0] is not used); sum_A r <= bound + share r(x)."""
    relax = lambda r, token: surrogate(r, token, neighbours, bound, share, offset)
    return descend(rule_for(tree)._replace(relax=relax), u, tree, target_logits)


def surrogate(r: Array, token: Array, neighbours: Array, bound: Array, share: Array, offset: Array) -> Array:
    """r^x float32[B, V] of distributions r [B, V] and tokens x [B]."""
    count = neighbours.shape[0]
    known = (token >= offset) & (token < offset + count)
    near = neighbours[jnp.clip(token - offset, 0, count - 1)] + offset  # int32[B, k]
    mass = jnp.take_along_axis(r, near, 1)
    r_x = jnp.take_along_axis(r, token[:, None], 1)
    lent = known[:, None] & (jnp.cumsum(mass, 1) <= bound + share * r_x)
    rows = jnp.arange(r.shape[0])[:, None]
    r = r.at[rows, jnp.where(lent, near, r.shape[1])].set(0.0, mode="drop")
    total = r_x + jnp.sum(jnp.where(lent, mass, 0.0), 1, keepdims=True)
    return r.at[rows, token[:, None]].set(total)


def lantern(
    neighbours: Array, delta: Array | float = 0.1, *, relative: bool = False, offset: Array | int = 0
) -> Verifier:
    """The rule with a table of neighbours. All arguments are leaves: other values compile nothing.

    Args:
      neighbours: int32[W, k], the tokens nearest to each of W tokens, nearest first, the token itself left out.
      delta: the bound; with `relative` the factor lambda >= 1 by which the probability of x may grow.
      offset: id of the first of the W tokens, for vocabularies that hold others too; the table counts from 0.

    Raises: ValueError for a relative bound below 1, which would lend nothing.
    """
    if relative and isinstance(delta, int | float) and delta < 1:
        raise ValueError(f"with relative=True delta is the factor lambda, at least 1; got {delta}")
    bound, share = (0.0, delta - 1) if relative else (delta, 0.0)
    return Verifier(
        "lantern",
        _rule,
        draws=("point_mass", "chain", "without_replacement"),
        guarantee="lossy",
        summary="a drafted token borrows the probability of its nearest neighbours, for image tokens",
        paper="Jang et al. 2025, arXiv 2410.03355",
        params=(
            jnp.asarray(neighbours, jnp.int32),
            jnp.asarray(bound, jnp.float32),
            jnp.asarray(share, jnp.float32),
            jnp.asarray(offset, jnp.int32),
        ),
    )


_rule = with_keys_and_params(core)
