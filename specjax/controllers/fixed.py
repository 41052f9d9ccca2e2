"""A constant draft depth."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.types import Controller


@functools.cache
def fixed(depth: int = 1 << 20) -> Controller:
    """Build a controller that drafts at most `depth` tokens deep. The default does not limit the drafter's tree."""
    return Controller(
        init=lambda batch: jnp.full((batch,), depth, jnp.int32),
        limit=lambda state: state,
        update=lambda state, info: state,
    )
