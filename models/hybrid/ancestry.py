"""Ancestors of the tokens of a pass, in the forms that recurrent layers need."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import platforms
from specjax.arrays.indexing import take_along
from specjax.arrays.texts import causal_mask, is_causal, traced_mask
from specjax.types import Array


class Ancestry(NamedTuple):
    """Ancestors of T new tokens among P pending and T new ones. All recurrent layers of a pass share them.

    In a text without pending tokens, each token follows the one before it. Both arrays are then None.
    """

    mask: Array | None  # bool[B, T, P + T], the token's ancestors and the token itself
    # int32[B, window, T], places of the inputs at distance window, ..., 1 in [committed window, P pending, T new]
    places: Array | None

    def mask_of(self, batch: int, count: int) -> Array:
        """Return the mask bool[B, T, P + T] of a pass over T tokens."""
        return traced_mask(causal_mask(batch, count)) if self.mask is None else self.mask

    def past_inputs(self, committed: Array, earlier: Array | None, new: Array) -> list[Array]:
        """Return the inputs [B, T, C] at distance window, ..., 1 before each new token, for a causal convolution.

        Args:
          committed: [B, window, C], the last inputs of the committed text, zeros before its start.
          earlier: [B, P, C], the inputs of pending tokens; None: there are none.
          new: [B, T, C].
        """
        inputs = jnp.concatenate([committed, *([] if earlier is None else [earlier]), new], 1)
        window, count = committed.shape[1], new.shape[1]
        if self.places is None:
            return [inputs[:, distance : distance + count] for distance in range(window)]
        skipped = self.places.shape[1] - window  # this layer's window may be shorter than the longest
        places = jnp.maximum(self.places[:, skipped:] - skipped, 0)
        past = _take_tokens(inputs, places.reshape(len(places), window * count))
        return [past[:, i * count : (i + 1) * count] for i in range(window)]


def _take_tokens(inputs: Array, places: Array) -> Array:
    """Return the rows `places` int32[B, N] of inputs [B, S, C].

    A TPU takes them by a product with one-hot rows, which is exact. A lookup has a layout that costs time in all later
    operations. With it, a layer of Qwen3.5 4B takes 60,000 cycles more for a tree of 16 nodes (schedule on a v5e chip).
    """
    if platforms.of_program() != "tpu":
        return take_along(inputs, places[..., None], 1)
    one_hot = jax.nn.one_hot(places, inputs.shape[1], dtype=inputs.dtype)
    return jnp.einsum("bns,bsc->bnc", one_hot, inputs, precision="highest")


def find_ancestry(mask: Array, window: int) -> Ancestry:
    """Return the ancestry of a pass, in which parents precede their children.

    Positions do not count: a segment of several tokens may take one slot of the cache.

    Args:
      mask: bool[B, T, P + T]. A constant mask of `specjax.arrays.texts.causal_mask` marks a text.
      window: number of earlier inputs that the longest convolution reads.
    """
    if is_causal(mask):
        return Ancestry(None, None)
    distances = jnp.arange(window, 0, -1)[:, None]
    until_end = jnp.cumsum(mask[..., ::-1], -1)[..., ::-1]  # int32[B, T, P + T], 1 at the token itself
    is_wanted = mask[:, None] & (until_end[:, None] - 1 == distances[..., None])  # bool[B, window, T, P + T]
    among_nodes = window + jnp.argmax(is_wanted, -1)
    num_ancestors = jnp.sum(mask, 2)[:, None] - 1  # among the nodes
    among_committed = window + num_ancestors - distances
    is_node = distances <= num_ancestors
    return Ancestry(mask, jnp.where(is_node, among_nodes, jnp.maximum(among_committed, 0)).astype(jnp.int32))
