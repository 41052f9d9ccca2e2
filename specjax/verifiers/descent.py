"""The tree descent shared by rules that test the children of a node one after another.

Equal siblings (drafts drawn with replacement) form one context: accepting one keeps the subtrees of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.arrays.indexing import take_along
from specjax.types import Array, TokenTree
from specjax.verifiers.node_logits import NodeLogits
from specjax.verifiers.verifier import Accepted, distribution, need_logits, normalise, residual


class Rule(NamedTuple):
    """A rule at one node, on rows of distributions [B, V]. Child x is accepted if u d(x) < r(x).

    r is the residual of the target's distribution, and d is the distribution that the child was drawn from.
    """

    enter: Callable[[Array, Array, Array], tuple[Array, Array]]  # (p, q, children [B]) -> (r, d)
    reject: Callable[[Array, Array, Array], tuple[Array, Array]]  # (r, d, token [B]) -> (r, d)
    final: Callable[[Array, Array, Array], Array] = lambda r, d, children: r  # distribution of the next token
    weight: Callable[[Array], Array] = lambda d: d  # d(x) -> weight; a child of weight 0 is rejected, r and d stay
    relax: Callable[[Array, Array], Array] = lambda r, token: r  # (r, token [B]) -> the substitute of r for this child
    point_mass: bool = False  # the tree has no draft distributions: q is 0 everywhere


class State(NamedTuple):
    active: Array  # bool[B]
    context: Array  # bool[B, N], nodes whose children are tested: equal siblings, usually one
    cursor: Array  # int32[B], the last child tested
    children: Array  # int32[B], number of children of the context
    r: Array  # float32[B, V]
    d: Array  # float32[B, V]
    path: Array  # int32[B, N]
    num_nodes: Array  # int32[B]


def descend(
    rule: Rule, u: Array, tree: TokenTree, target_logits: Array | NodeLogits, *, also: Array | None = None
) -> Accepted:
    """Apply `rule` from the root down, with uniforms float32[B, N]. u[:, 0] is not used.

    Each iteration tests one child per row. So the work is that of the longest row, at most depth x children rows of V.

    Args:
      also: bool[B, N], children that are accepted even if their test fails.
    """
    batch, n = tree.tokens.shape
    draft_logits = None if rule.point_mass else need_logits(tree)
    index = jnp.arange(n)
    at = lambda row, token: jnp.take_along_axis(row, token[:, None], 1)[:, 0]

    def enter(node, context):
        children = children_of(context, tree)
        count = jnp.sum(children, 1)
        p = distribution(target_logits, node)
        # Only some of several equal siblings may have children. The draft's rows of the others are undefined.
        parent = jnp.where(count > 0, at(tree.parents, jnp.argmax(children, 1)), node)
        q = jnp.zeros_like(p) if draft_logits is None else distribution(draft_logits, parent)
        return count, *rule.enter(p, q, count)

    def body(s: State) -> State:
        children = children_of(s.context, tree)
        remaining = children & (index > s.cursor[:, None])
        active = s.active & jnp.any(remaining, 1)
        i = jnp.argmax(remaining, 1).astype(jnp.int32)
        token = at(tree.tokens, i)
        d_x = rule.weight(at(s.d, token))
        r_x = rule.relax(s.r, token)
        passed = (d_x > 0) & (at(u, i) * d_x < at(r_x, token))
        accepted = active & (passed if also is None else passed | at(also, i))
        rejected = (active & (d_x > 0) & ~accepted)[:, None]
        r, d = (
            jnp.where(rejected, new, old) for new, old in zip(rule.reject(r_x, s.d, token), (s.r, s.d), strict=True)
        )
        context = jnp.where(accepted[:, None], children & (tree.tokens == token[:, None]), s.context)
        entered = jax.lax.cond(
            jnp.any(accepted), lambda: enter(i, context), lambda: (s.children, s.r, s.d)
        )  # a new context costs two rows of V, and a bisection in k-SEQ
        pick = lambda new, old: jnp.where(accepted.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
        count, r, d = (pick(new, old) for new, old in zip(entered, (s.children, r, d), strict=True))
        path = jnp.where(accepted[:, None] & (index == s.num_nodes[:, None]), i[:, None], s.path)
        cursor = jnp.where(active, i, s.cursor)
        return State(active, context, cursor, count, r, d, path, s.num_nodes + accepted)

    root = jnp.zeros((batch,), jnp.int32)
    context = jnp.broadcast_to(index == 0, (batch, n))
    path = jnp.where(context, 0, -1).astype(jnp.int32)
    children, r, d = enter(root, context)
    state = State(jnp.ones((batch,), bool), context, root, children, r, d, path, root + 1)
    if n > 1:
        with jax.named_scope(scopes.WALK):
            state = jax.lax.while_loop(lambda s: jnp.any(s.active), body, state)
    return Accepted(state.path, state.num_nodes, rule.final(state.r, state.d, state.children))


def children_of(context: Array, tree: TokenTree) -> Array:
    """Return bool[B, N]: the valid children of the nodes in `context` bool[B, N]."""
    return tree.valid & (tree.parents >= 0) & take_along(context, jnp.maximum(tree.parents, 0), 1)


def without(row: Array, token: Array) -> Array:
    """Return `row` [B, V] with a zero at token [B]."""
    return jnp.where(jnp.arange(row.shape[-1]) == token[:, None], 0.0, row)


def _reject_sampled(r, d, token):
    remaining = without(d, token)
    return residual(r, d), normalise(remaining, remaining)


WITHOUT_REPLACEMENT = Rule(enter=lambda p, q, children: (p, q), reject=_reject_sampled)
"""Siblings drawn one after another (RSD): r <- norm([r - d]+), then d(x) <- 0, d <- norm(d)."""

POINT_MASS = Rule(
    enter=lambda p, q, children: (p, q),
    reject=lambda r, d, token: (normalise(without(r, token), r), d),
    weight=jnp.ones_like,
    point_mass=True,
)
"""Children fixed without randomness: x is accepted if u < r(x), else r(x) <- 0, r <- norm(r)."""


def rule_for(tree: TokenTree) -> Rule:
    """Return the exact rule for a tree drawn without replacement, such as a chain, or for a fixed tree (no logits)."""
    return POINT_MASS if tree.logits is None else WITHOUT_REPLACEMENT
