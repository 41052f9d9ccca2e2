"""Ancestors of the tokens of a pass, in the forms that recurrent layers need."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.types import Array


class Ancestry(NamedTuple):
    """Ancestors of T new tokens among P pending and T new ones. All recurrent layers of a pass share them."""

    mask: Array  # bool[B, T, P + T], the token's ancestors and the token itself
    # int32[B, T, window], places of the inputs at distance window, ..., 1 in [committed window, P pending, T new]
    places: Array

    def windows(self, committed: Array, earlier: Array | None, new: Array) -> Array:
        """Return the inputs [B, T, window + 1, C] that a causal convolution reads for each new token.

        Args:
          committed: [B, window, C], the last inputs of the committed text, zeros before its start.
          earlier: [B, P, C], the inputs of pending tokens; None: there are none.
          new: [B, T, C].
        """
        inputs = jnp.concatenate([committed, *([] if earlier is None else [earlier]), new], 1)
        skipped = self.places.shape[2] - committed.shape[1]  # this layer's window may be shorter than the longest
        places = jnp.maximum(self.places[:, :, skipped:] - skipped, 0)
        batch, count, window = places.shape
        past = take_along(inputs, places.reshape(batch, count * window, 1), 1)
        return jnp.concatenate([past.reshape(batch, count, window, -1), new[:, :, None]], 2)


def find_ancestry(mask: Array, positions: Array, key_positions: Array, window: int) -> Ancestry:
    """Return the ancestry of a pass.

    Args:
      mask: bool[B, T, P + T].
      positions: int32[B, T] of the new tokens. Only their differences count, so segments of several tokens that take
        one slot of the cache are possible.
      key_positions: int32[B, P + T] of the pending and the new tokens.
      window: number of earlier inputs that the longest convolution reads.
    """
    distances = jnp.arange(window, 0, -1)
    wanted = positions[:, :, None] - distances  # int32[B, T, window]
    is_wanted = mask[:, :, None] & (key_positions[:, None, None] == wanted[..., None])  # bool[B, T, window, P + T]
    among_nodes = window + jnp.argmax(is_wanted, -1)
    num_ancestors = jnp.sum(mask, 2)[:, :, None] - 1  # among the nodes
    among_committed = window + num_ancestors - distances
    is_node = distances <= num_ancestors
    return Ancestry(mask, jnp.where(is_node, among_nodes, jnp.maximum(among_committed, 0)).astype(jnp.int32))
