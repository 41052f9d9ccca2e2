"""The tree walk shared by rules in which the target chooses one token per node."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.types import Array, TokenTree, Verdict


def walk(tree: TokenTree, choose: Callable[[Array], Array]) -> Verdict:
    """Walk down from the root while the token chosen at a node is one of its children.

    Args:
      choose: node int32[B] -> the target's token there, int32[B]. It is called once per depth of the deepest row.
    """
    batch, n = tree.tokens.shape
    root = jnp.zeros((batch,), jnp.int32)
    path = jnp.full((batch, n), -1, jnp.int32).at[:, 0].set(0)

    def child(node, token):
        """Return the first valid child of `node` with this `token`, and True if such a child exists."""
        hit = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid
        return jnp.argmax(hit, 1).astype(jnp.int32), jnp.any(hit, 1)

    def body(carry):
        node, token, active, path, count = carry
        token = jnp.where(active, choose(node), token)
        next_node, exists = child(node, token)
        active &= exists
        path = jnp.where(active[:, None] & (jnp.arange(n) == count[:, None]), next_node[:, None], path)
        return jnp.where(active, next_node, node), token, active, path, count + active

    one = jnp.ones((batch,), jnp.int32)
    if n == 1:
        return Verdict(path, one, choose(root))
    with jax.named_scope(scopes.WALK):
        carry = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), body, (root, root, one > 0, path, one))
    _, token, _, path, count = carry
    return Verdict(path, count, token)
