"""Plain autoregressive decoding: the tree with one node.

No draft, so every pass of the target gives one token. It runs through the same loop as every method: the baseline of
all comparisons.
Guarantee: distribution.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.indexing import take_along
from specjax.trees.operations import chain
from specjax.types import Drafter


@functools.cache
def autoregressive() -> Drafter:
    """The drafter that drafts nothing."""
    return Drafter(init=_init, propose=_propose, update=_update, num_nodes=1, max_depth=0, follows_any_tree=True)


def _init(params, context):
    return ()


def _propose(params, keys, state, context, limit):
    root = take_along(context.tokens, context.length[:, None] - 1, 1)
    return chain(root, jnp.ones_like(root, bool)), state


def _update(params, state, tree, verdict, output):
    return state
