"""Random positions and depths for heads that read the target's keys, as in LongSpec (arXiv 2502.17421).

Anchor-offset positions: the first 0 to 4 tokens of a text keep their positions, because models attend to them from
everywhere. One random number is added to the positions of all later tokens of the row, for the target and for the head.
Large positions are then trained without long texts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.training.data.packing import PackedBatch
from specjax.types import Array

MAX_SINKS = 4  # the largest number of first tokens that keep their positions
MAX_OFFSET = 30_000
RESERVE = 1_000  # positions below the limit of the model that are never drawn


def draw_positions(packed: PackedBatch, keys: Array, max_positions: int) -> Array:
    """Return int32[B, T], random positions of the tokens of a batch. Each row has its own key of keys [B]."""
    size = packed.tokens.shape[1]
    limit = max(min(MAX_OFFSET, max_positions - RESERVE) - size, 0)

    def draw(key: Array) -> tuple[Array, Array]:
        of_sinks, of_offset = jax.random.split(key)
        return jax.random.randint(of_sinks, (), 0, MAX_SINKS + 1), jax.random.randint(of_offset, (), 0, limit + 1)

    sinks, offset = jax.vmap(draw)(keys)
    return shift_positions(jnp.asarray(packed.text_start), sinks, offset)


def draw_depths(positions: Array, keys: Array, depths: int) -> Array:
    """Return int32[B, R], a random depth below `depths` for each round. Each row has its own key of keys [B]."""
    of_row = lambda key: jax.random.randint(jax.random.fold_in(key, 1), positions.shape[1:], 0, depths)
    return jax.vmap(of_row)(keys)


def shift_positions(text_start: Array, sinks: Array, offset: Array) -> Array:
    """Return int32[B, T], columns plus `offset` int32[B], except for the first `sinks` int32[B] tokens of each text."""
    column = jnp.arange(text_start.shape[1])
    return column + jnp.where(column - text_start >= sinks[:, None], offset[:, None], 0)
