"""The place in the answer that each node of a tree would have, for processors that read nothing else of a text."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax.types import Array


def init_count(params: Any, settings: Any, tokens: Array, length: Array, vocab_size: int) -> Array:
    """Return the tokens int32[B] of the answer, which is empty."""
    return jnp.zeros_like(length)


def add_count(params: Any, count: Array, tokens: Array, added: Array) -> Array:
    """Return the tokens int32[B] of the answer after `added` more."""
    return count + added


def places_of_nodes(count: Array, above: Array) -> Array:
    """Return the place int32[B, R] of the token after each node, where `above` bool[B, R, N] is the path to it."""
    drafted = above & (jnp.arange(above.shape[2]) > 0)  # the path without the root
    return count[:, None] + jnp.sum(drafted, 2)
