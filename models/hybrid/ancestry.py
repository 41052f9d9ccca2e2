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
        return jnp.concatenate([past.reshape(batch, count, window, inputs.shape[2]), new[:, :, None]], 2)


def find_ancestry(mask: Array, window: int) -> Ancestry:
    """Return the ancestry of a pass, in which parents precede their children.

    Positions do not count: a segment of several tokens may take one slot of the cache.

    Args:
      mask: bool[B, T, P + T].
      window: number of earlier inputs that the longest convolution reads.
    """
    distances = jnp.arange(window, 0, -1)
    until_end = jnp.cumsum(mask[..., ::-1], -1)[..., ::-1]  # int32[B, T, P + T], 1 at the token itself
    is_wanted = mask[:, :, None] & (until_end[:, :, None] - 1 == distances[:, None])  # bool[B, T, window, P + T]
    among_nodes = window + jnp.argmax(is_wanted, -1)
    num_ancestors = jnp.sum(mask, 2)[:, :, None] - 1  # among the nodes
    among_committed = window + num_ancestors - distances
    is_node = distances <= num_ancestors
    return Ancestry(mask, jnp.where(is_node, among_nodes, jnp.maximum(among_committed, 0)).astype(jnp.int32))
