"""The descent shared by rules in which the target names a token and the draft either holds it or not."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.types import Array, TokenTree, Verdict


def walk(tree: TokenTree, choose: Callable[[Array], Array]) -> Verdict:
    """Go down from the root while the token chosen at a node is one of its children.

    Args:
      choose: node int32[B] -> the target's token there int32[B]; called once per depth, only as deep as any row goes.
    """
    batch, n = tree.tokens.shape
    root = jnp.zeros((batch,), jnp.int32)
    start = choose(root)
    path = jnp.full((batch, n), -1, jnp.int32).at[:, 0].set(0)

    def child(node, token):
        """The first valid child of `node` that holds `token`, and whether there is one."""
        hit = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid
        return jnp.argmax(hit, 1).astype(jnp.int32), jnp.any(hit, 1)

    def body(carry):
        node, token, going, path, count = carry
        below, found = child(node, token)
        going &= found
        path = jnp.where(going[:, None] & (jnp.arange(n) == count[:, None]), below[:, None], path)
        node = jnp.where(going, below, node)
        return node, jnp.where(going, choose(node), token), going, path, count + going

    def any_going(carry):
        return jnp.any(carry[2])

    carry = (root, start, jnp.ones((batch,), bool), path, jnp.ones((batch,), jnp.int32))
    if n > 1:
        carry = jax.lax.while_loop(any_going, body, carry)
    _, token, _, path, count = carry
    return Verdict(path, count, token)
