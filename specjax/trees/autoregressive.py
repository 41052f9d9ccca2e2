"""Plain autoregressive decoding, as a drafter whose trees have one node.

Without a draft, every target pass yields one token. It runs in the same loop as every method, so it is the baseline of
all comparisons.
Guarantee: distribution.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.catalog import Method
from specjax.trees.operations import chain
from specjax.types import Drafter, Traits, TreeSize

METHOD = Method(
    name="autoregressive",
    kind="drafter",
    guarantee="distribution",
    summary="decodes one token per target pass without a draft; the baseline",
)


@functools.cache
def autoregressive() -> Drafter:
    """Return a drafter with empty drafts."""
    return Drafter(propose=_propose, size=TreeSize(1, 0), traits=Traits(widths=(), follows_any_tree=True))


def _propose(params, keys, state, context, limit):
    return chain(context.root, jnp.ones_like(context.root, bool)), state
