"""Greedy multi-path block verification (GBV): the best of K independent chains, verified as one block.

Thomas, Pal: Greedy Multi-Path Block Verification for Faster Decoding in Speculative Sampling (2026), arXiv 2602.16961.

Rule: order the tokens of a context by p/q, ties by id, and paths lexicographically; take the largest of the K drafted
paths. With F_t = sum of q up to t in this order and rho = 1 at the root, the token of the largest path has the
  distribution q'(t) ~ q(t) sum_{i<K} (1 - rho (1 - F_t))^i (1 - rho (1 - F_t + q(t)))^{K-1-i},
then rho <- rho q(t) / (1 - rho + rho F_t). Run block verification on that path with q' for q.
Guarantee: distribution, because the order is strict. More paths can be worse: the choice skews q'.
F_t needs the vocabulary sorted, once per drafted depth of the chosen path (the loop that picks the path does not sort).
A threshold search gives F_t for single tokens, but block verification sums [w p - q']+ over all of them.
Deviation: the recursion in rho is that of the card, equal to the paper's and without underflow.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.trees.operations import chain
from specjax.types import Array, TokenTree
from specjax.verifiers.descent import children_of
from specjax.verifiers.exact.block import core as verify_block
from specjax.verifiers.verifier import Accepted, Verifier, distribution, need_logits, with_keys


def core(u: Array, tree: TokenTree, target_logits: Array, *, paths: int) -> Accepted:
    """The rule with its uniforms given; `tree` holds `paths` chains below the root, level by level."""
    batch, n = tree.tokens.shape
    depth, left_over = divmod(n - 1, paths)
    if left_over:
        raise UsageError(
            f"multipath_block for {paths} paths was given {n - 1} drafted nodes, which are no {paths} chains of one "
            "length; give it as many paths as the tree has, multipath_block(paths)"
        )
    logits = need_logits(tree)
    index = jnp.arange(n)

    def pick(carry, level):
        """The largest drafted token below the context, and the context it leads to."""
        context, node = carry
        children = children_of(context, tree)
        rank = _order(distribution(target_logits, node), distribution(logits, node))  # float32[B, V]
        rank = jnp.where(children, jnp.take_along_axis(rank, tree.tokens, 1), -jnp.inf)
        best = jnp.max(rank, 1, keepdims=True)
        token = jnp.max(jnp.where(children & (rank == best), tree.tokens, -1), 1)  # ties: the larger id is larger
        context = children & (tree.tokens == token[:, None])
        node = jnp.where(token >= 0, jnp.argmax(context, 1), node).astype(jnp.int32)
        return (context, node), (node, token >= 0)

    start = jnp.broadcast_to(index == 0, (batch, n)), jnp.zeros((batch,), jnp.int32)
    _, (nodes, found) = jax.lax.scan(pick, start, None, length=depth)
    nodes = jnp.concatenate([start[1][:, None], nodes.T], 1)  # int32[B, L + 1]
    valid = jnp.concatenate([jnp.ones((batch, 1), bool), found.T], 1)
    take = lambda x: take_along(x, nodes.reshape(*nodes.shape, *(1,) * (x.ndim - 2)), 1)
    tokens, drafted = take(tree.tokens), jnp.sum(tree.valid & (tree.parents == 0), 1)
    skewed = _skew(logits, target_logits, nodes[:, :-1], tokens[:, 1:], drafted)
    skewed = jnp.pad(skewed, ((0, 0), (0, 1), (0, 0)))  # nothing is drafted below the last node
    end = verify_block(take(u), chain(tokens, valid, skewed), take(target_logits))
    chosen = jnp.where(end.path >= 0, nodes, -1)
    return end._replace(path=jnp.pad(chosen, ((0, 0), (0, n - 1 - depth)), constant_values=-1))


def _order(p: Array, q: Array) -> Array:
    """log p/q of distributions [..., V]; -inf where p is 0 or nothing is ever drawn."""
    return jnp.where((q > 0) & (p > 0), jnp.log(p) - jnp.log(jnp.where(q > 0, q, 1.0)), -jnp.inf)


def _skew(draft_logits: Array, target_logits: Array, nodes: Array, following: Array, k: Array) -> Array:
    """log q' float32[B, L, V] below nodes [B, L] of a path, with logits [B, N, V] and the token after each [B, L].

    k: int32[B], how many paths were drafted.
    """
    rows = jnp.arange(nodes.shape[0])[:, None]

    def below(node):
        """q of one depth, and F_t: q summed over the tokens up to t in the strict order."""
        p, q = distribution(target_logits, node), distribution(draft_logits, node)
        order = jnp.argsort(_order(p, q), axis=-1, stable=True)  # ties by id
        total = jnp.minimum(jnp.cumsum(take_along(q, order, -1), -1), 1.0)
        return q, jnp.zeros_like(q).at[rows, order].set(total, unique_indices=True)

    def body(rho, xs):
        node, token = xs
        q, f = below(node)
        high, low = 1 - rho[:, None] * (1 - f), 1 - rho[:, None] * (1 - f + q)
        low = jnp.maximum(low, 0.0)

        def add(i, carry):
            total, power = carry  # sum_{j<=i} high^j low^{i-j}, high^i
            more = (i < k)[:, None]
            power = power * high
            return jnp.where(more, total * low + power, total), power

        total, _ = jax.lax.fori_loop(1, jnp.max(k), add, (jnp.ones_like(q), jnp.ones_like(q)))
        at = lambda row: jnp.take_along_axis(row, token[:, None], 1)[:, 0]
        reach = 1 - rho + rho * at(f)
        return jnp.where(reach > 0, rho * at(q) / jnp.where(reach > 0, reach, 1.0), 0.0), jnp.log(q * total)

    _, skewed = jax.lax.scan(body, jnp.ones(nodes.shape[:1]), (nodes.T, following.T))
    return jnp.moveaxis(skewed, 0, 1)


@functools.cache
def multipath_block(paths: int) -> Verifier:
    """The rule for drafts of `paths` chains drawn independently, as `trees.independent_paths` makes them.

    Raises: UsageError for less than one path.
    """
    if paths < 1:
        raise UsageError(f"paths must be at least 1, not {paths}")
    return Verifier(
        f"multipath_block({paths})",
        with_keys(functools.partial(core, paths=paths)),
        draws=("with_replacement", "chain") if paths == 1 else ("with_replacement",),
        guarantee="distribution",
        summary="picks the best of K independent chains and verifies it as a block",
        paper="Thomas, Pal 2026, arXiv 2602.16961",
    )
