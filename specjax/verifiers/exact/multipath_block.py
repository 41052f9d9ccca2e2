"""Greedy multi-path block verification (GBV): the best of K independent chains, verified as one block.

Thomas, Pal: Greedy Multi-Path Block Verification for Faster Decoding in Speculative Sampling (2026), arXiv 2602.16961.

Rule: order the tokens of a context by p/q, ties by id, and paths lexicographically. Take the largest of the K drafted
paths. Let F_t = sum of q up to t in this order, and rho = 1 at the root. The token of the largest path then has the
  distribution q'(t) ~ q(t) sum_{i<K} (1 - rho (1 - F_t))^i (1 - rho (1 - F_t + q(t)))^{K-1-i};
then rho <- rho q(t) / (1 - rho + rho F_t). Run block verification on that path with q' for q.
Guarantee: distribution, because the order is strict. More paths can be worse, because the choice skews q'.
Paths may end early, by the limit or a stop condition, if only the preceding text decides that. Then equal paths end
together, and the largest path is the largest one in a smaller tree of texts. So the number of nodes is not fixed.
F_t needs a sorted vocabulary, once per drafted depth of the chosen path. A threshold search gives F_t for single
tokens, but block verification sums [w p - q']+ over all of them.
Deviation: the recursion in rho is equal to the paper's but does not underflow.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.types import Array, TokenTree
from specjax.verifiers.descent import children_of
from specjax.verifiers.exact.block import acceptance_probability
from specjax.verifiers.verifier import Accepted, Verifier, distribution, need_logits, normalise, with_keys


class State(NamedTuple):
    active: Array  # bool[B], True if the selected path has a node at this depth
    depth: Array  # int32[]
    context: Array  # bool[B, N], nodes at this depth whose texts equal the selected path
    node: Array  # int32[B], the first of them
    rho: Array  # float32[B]
    log_w: Array  # float32[B]
    path: Array  # int32[B, N], the selected path so far
    num_nodes: Array  # int32[B], accepted nodes of the path so far
    residual: Array  # float32[B, V], residual after these nodes


def core(u: Array, tree: TokenTree, target_logits: Array, *, paths: int | None = None) -> Accepted:
    """Apply the rule with given uniforms float32[B, N] to the first `paths` chains below the root (None: all).

    u[:, 0] is not used.
    """
    batch, n = tree.tokens.shape
    logits, index = need_logits(tree), jnp.arange(n)
    tree = _first_chains(tree, n if paths is None else paths)
    k = jnp.sum(tree.valid & (tree.parents == 0), 1)
    at = lambda row, i: jnp.take_along_axis(row, i[:, None], 1)[:, 0]

    def body(s: State) -> State:
        children = children_of(s.context, tree)
        drafted = s.active & jnp.any(children, 1)
        p, q = distribution(target_logits, s.node), distribution(logits, s.node)
        order = _order(p, q)
        skewed, up_to = jax.lax.cond(jnp.any(drafted), lambda: _skew(order, q, s.rho, k), lambda: (q, q))
        w = jnp.exp(s.log_w)
        excess = jnp.maximum(w[:, None] * p - jnp.where(drafted[:, None], skewed, 0.0), 0.0)
        tested = (s.depth == 0) | (at(u, s.node) < acceptance_probability(jnp.sum(excess, -1), w, drafted))
        better = s.active & tested
        # The largest drafted token below the context, and the context it leads to.
        rank = jnp.where(children, jnp.take_along_axis(order, tree.tokens, 1), -jnp.inf)
        is_best = children & (rank == jnp.max(rank, 1, keepdims=True))
        token = jnp.max(jnp.where(is_best, tree.tokens, 0), 1)  # ties: the larger id is larger
        context = children & (tree.tokens == token[:, None])
        node = jnp.where(drafted, jnp.argmax(context, 1), s.node).astype(jnp.int32)
        reach = 1 - s.rho + s.rho * at(up_to, token)
        has_mass = (at(p, token) > 0) & (at(skewed, token) > 0)
        ratio = jnp.where(has_mass, jnp.log(at(p, token)) - jnp.log(at(skewed, token)), -jnp.inf)
        return State(
            active=drafted,
            depth=s.depth + 1,
            context=context,
            node=node,
            rho=jnp.where(reach > 0, s.rho * at(q, token) / jnp.where(reach > 0, reach, 1.0), 0.0),
            log_w=jnp.minimum(0.0, s.log_w + ratio),
            path=jnp.where(drafted[:, None] & (index == s.depth + 1), node[:, None], s.path),
            num_nodes=jnp.where(better, s.depth + 1, s.num_nodes),
            residual=jnp.where(better[:, None], normalise(excess, p), s.residual),
        )

    zero = jnp.zeros((batch,))
    root = jnp.broadcast_to(index == 0, (batch, n))
    start = State(
        active=jnp.ones((batch,), bool), depth=jnp.int32(0), context=root, node=zero.astype(jnp.int32), rho=zero + 1,
        log_w=zero, path=jnp.where(root, 0, -1).astype(jnp.int32), num_nodes=zero.astype(jnp.int32),
        residual=jnp.zeros((batch, target_logits.shape[-1])),
    )  # fmt: skip
    end = jax.lax.while_loop(lambda s: jnp.any(s.active), body, start)
    return Accepted(jnp.where(index < end.num_nodes[:, None], end.path, -1), end.num_nodes, end.residual)


def _first_chains(tree: TokenTree, paths: int) -> TokenTree:
    """Keep only the first `paths` children of the root, and the first child of every other node."""
    precedes = jnp.tril(jnp.ones((tree.tokens.shape[1],) * 2, bool), -1) & tree.valid[:, None, :]
    elder = jnp.sum((tree.parents[:, :, None] == tree.parents[:, None, :]) & precedes, 2)
    return tree._replace(valid=tree.valid & (elder < jnp.where(tree.parents == 0, paths, 1)))


def _order(p: Array, q: Array) -> Array:
    """Return log p/q of distributions [..., V], or -inf where p is 0 or the token is never drawn."""
    return jnp.where((q > 0) & (p > 0), jnp.log(p) - jnp.log(jnp.where(q > 0, q, 1.0)), -jnp.inf)


def _skew(order: Array, q: Array, rho: Array, k: Array) -> tuple[Array, Array]:
    """Return q' and F_t, float32[B, V], of a context whose tokens are ordered by `order` [B, V].

    Args:
      k: int32[B], number of drafted paths.
    """
    ranked = jnp.argsort(order, axis=-1, stable=True)  # ties by id
    total = jnp.minimum(jnp.cumsum(take_along(q, ranked, -1), -1), 1.0)
    f = jnp.zeros_like(q).at[jnp.arange(len(q))[:, None], ranked].set(total, unique_indices=True)
    high = 1 - rho[:, None] * (1 - f)
    low = jnp.maximum(1 - rho[:, None] * (1 - f + q), 0.0)

    def add(i, carry):
        total, power = carry  # sum_{j<=i} high^j low^{i-j}, high^i
        power = power * high
        return jnp.where((i < k)[:, None], total * low + power, total), power

    total, _ = jax.lax.fori_loop(1, jnp.max(k), add, (jnp.ones_like(q), jnp.ones_like(q)))
    return normalise(q * total, q), f


@functools.cache
def multipath_block(paths: int | None = None) -> Verifier:
    """Build the rule for chains drawn independently, as by `trees.independent_paths`.

    For any other tree drawn with replacement, the rule uses the chains of first children. They must have equal lengths.
    A shape that ends some chains earlier (draws "with_replacement_uneven") would need another q'.

    Args:
      paths: K, the number of drafted chains to use; None: all.

    Raises: UsageError for less than one path.
    """
    if paths is not None and paths < 1:
        raise UsageError(f"multipath_block: paths must be at least 1, not {paths}")
    return Verifier(
        "multipath_block" if paths is None else f"multipath_block({paths})",
        with_keys(functools.partial(core, paths=paths)),
        draws=("chain", "with_replacement"),
        guarantee="distribution",
        summary="picks the best of K independent chains and verifies it as a block",
        paper="Thomas, Pal 2026, arXiv 2602.16961",
        by_row=True,
    )
