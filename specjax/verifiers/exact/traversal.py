"""Traversal verification: a tree is verified from its leaves to its root.

Weng et al.: Traversal Verification for Speculative Tree Decoding (NeurIPS 2025), arXiv 2505.12398.

Rule: w(root) = 1, w(child x) = min(1, w(parent) p(x) / q(x)) with the parent's current p, q. Take the first leaf x in
depth-first order.
  accept the path to x if u < w(x) (the root: always), and draw the next token from its current p;
  else delete x, and at its parent a set s = [w(a) p - q]+,
  w(a) <- sum s / (sum s + 1 - w(a)), p <- norm(s), q(x) <- 0, q <- norm(q).
Guarantee: distribution, for siblings drawn without replacement, or independently once equal siblings are merged.
A deep path can be accepted although its first token alone would be rejected. On a chain it is block verification.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.trees import operations
from specjax.types import Array, TokenTree
from specjax.verifiers.descent import without
from specjax.verifiers.verifier import Accepted, Verifier, distribution, need_logits, normalise, with_keys


class State(NamedTuple):
    active: Array  # bool[B]
    node: Array  # int32[B]
    remaining: Array  # bool[B, N], nodes not deleted
    weight: Array  # float32[B, N]
    p: Array  # float32[B, N, V], current distributions
    q: Array  # float32[B, N, V], current distributions; row `_drawn_below[node]` belongs to a node


def core(u: Array, tree: TokenTree, target_logits: Array) -> Accepted:
    """Apply the rule with given uniforms float32[B, N]. u[:, 0] is not used."""
    drafted, tree = tree, operations.merge_equal_siblings(tree)
    q_row = _drawn_below(drafted, tree)
    batch, n = tree.tokens.shape
    rows = jnp.arange(batch)
    at = lambda x, node: take_along(x, node[:, None], 1)[:, 0]
    # A token outside of the vocabulary has no probability. A plain index would read the last token instead.
    of_token = lambda x, node, token: x.at[rows, node, token].get(mode="fill", fill_value=0.0)

    def step(s: State) -> State:
        """Go down to the first child. At a leaf, test it; if it fails, delete it and go up."""
        children = s.remaining & (tree.parents == s.node[:, None])
        inner = jnp.any(children, 1)
        weight = at(s.weight, s.node)
        stop = ~inner & ((s.node == 0) | (at(u, s.node) < weight))
        fail = s.active & ~inner & ~stop

        parent = jnp.maximum(at(tree.parents, s.node), 0)
        parent_row = at(q_row, parent)
        failed = at(tree.tokens, s.node)
        p_a, q_a, up = jax.lax.cond(
            jnp.any(fail),
            lambda p_a, q_a, w: _delete(p_a, q_a, w, failed),
            lambda p_a, q_a, w: (p_a, q_a, w),
            s.p[rows, parent], s.q[rows, parent_row], at(s.weight, parent),
        )  # fmt: skip
        # The writes are outside of the branch and before the next read. Otherwise XLA copies the buffers.
        place = lambda node: jnp.where(fail, node, n)
        p = s.p.at[rows, place(parent)].set(p_a, mode="drop")
        q = s.q.at[rows, place(parent_row)].set(q_a, mode="drop")

        child = jnp.argmax(children, 1).astype(jnp.int32)
        token = at(tree.tokens, child)
        p_x, q_x = of_token(p, s.node, token), of_token(q, at(q_row, s.node), token)
        down = jnp.minimum(1.0, weight * jnp.where(q_x > 0, p_x / jnp.where(q_x > 0, q_x, 1.0), 0.0))
        deeper = s.active & inner
        node = jnp.where(deeper, child, jnp.where(fail, parent, s.node))
        changed = jnp.where(deeper, down, jnp.where(fail, up, at(s.weight, node)))
        remaining = s.remaining & ~(fail[:, None] & (jnp.arange(n) == s.node[:, None]))
        return State(s.active & ~stop, node, remaining, s.weight.at[rows, node].set(changed), p, q)

    state = State(
        active=jnp.ones((batch,), bool),
        node=jnp.zeros((batch,), jnp.int32),
        remaining=tree.valid,
        weight=jnp.ones((batch, n)),
        p=distribution(target_logits),
        q=distribution(need_logits(tree)),
    )
    end = jax.lax.while_loop(lambda s: jnp.any(s.active), step, state)
    path, num_nodes = operations.path_to(tree.parents, end.node)
    return Accepted(path, num_nodes, end.p[rows, end.node])


def _drawn_below(drafted: TokenTree, merged: TokenTree) -> Array:
    """Return int32[B, N]: for each merged node, the drafted node below which its first child was drawn.

    Only some of several equal siblings may have children, and the draft's logits of the others are undefined.
    """
    node = jnp.arange(merged.tokens.shape[1])
    is_child = (merged.parents[:, None, :] == node[:, None]) & merged.valid[:, None, :]  # bool[B, N, its children]
    parent = take_along(drafted.parents, jnp.argmax(is_child, 2), 1)
    return jnp.where(jnp.any(is_child, 2), parent, node)


def _delete(p: Array, q: Array, weight: Array, token: Array):
    """Return the distributions [B, V] and weight [B] of a node after its child `token` [B] failed."""
    s = jnp.maximum(weight[:, None] * p - q, 0.0)
    total = jnp.sum(s, -1)
    remaining = without(q, token)
    denominator = total + 1 - weight
    up = jnp.where(total > 0, total / jnp.where(denominator > 0, denominator, 1.0), 0.0)
    return normalise(s, p), normalise(remaining, remaining), up


traversal = Verifier(
    "traversal",
    with_keys(core),
    draws=("chain", "without_replacement", "with_replacement", "with_replacement_uneven"),
    guarantee="distribution",
    summary="verifies a tree from the leaves up: a deep path can outweigh its first token",
    paper="Weng et al. 2025, arXiv 2505.12398",
)
