"""Penalties that depend only on the number of occurrences of each token in the text.

The counts of a node are those of the committed text plus those of the path to the node. They are never stored as
[B, N, V]. First the given rows of the logits are changed with the counts of the committed text. The counts of a node
differ only at the tokens on its path, so at most N logits per row are then recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.types import Array, Processor, TokenTree

Change = Callable[[Array, Array, Array], Array]
"""(strength, count, logit) -> logit, elementwise."""


class Counted(NamedTuple):
    """Token counts of the text, and the strength of the penalty."""

    counts: Array  # int32[B, V]
    strength: Array  # float32[B]


def by_count(change: Change, strength: Any, *, prompt: bool) -> Processor:
    """Build a processor that changes each logit by the token's count in the decoded text.

    Args:
      strength: a number, or one per row. prompt: count the prompt as well.
    """
    init, process, update = _functions(change, prompt)
    rows = jnp.atleast_1d(jnp.asarray(strength, jnp.float32))
    return Processor(process=process, init=init, update=update, by_row=True, settings=rows)


@functools.cache
def _functions(change: Change, prompt: bool):
    def init(params, strength: Array, tokens: Array, length: Array, vocab_size: int) -> Counted:
        zeros = jnp.zeros((len(length), vocab_size), jnp.int32)
        return Counted(_add(zeros, tokens, length) if prompt else zeros, strength)

    def process(params, state: Counted, tree: TokenTree, above: Array, logits: Array) -> Array:
        strength = state.strength[:, None, None]
        changed = change(strength, state.counts[:, None], logits)
        (batch, num_rows, vocab), n = logits.shape, tree.tokens.shape[1]
        if n == 1:
            return changed
        drafted = above & (jnp.arange(n) > 0)  # bool[B, R, N]: ancestors of the node of each row, without the root
        tokens = jnp.clip(tree.tokens, 0, vocab - 1)  # int32[B, N]; nodes of other tokens are never accepted
        equal = tokens[:, :, None] == tokens[:, None, :]
        # int32[B, R, N]: occurrences of token j among the ancestors of a row; exact integers in any precision
        on_path = (drafted.astype(jnp.float32) @ equal.astype(jnp.float32)).astype(jnp.int32)
        ids = jnp.broadcast_to(tokens[:, None], drafted.shape)  # token j, in each row
        recomputed = change(
            strength, take_along(state.counts, tokens, 1)[:, None] + on_path, take_along(logits, ids, 2)
        )
        rows, nodes = jnp.arange(batch)[:, None, None], jnp.arange(num_rows)[:, None]
        return changed.at[rows, nodes, jnp.where(drafted, ids, vocab)].set(recomputed, mode="drop")

    def update(params, state: Counted, tokens: Array, count: Array) -> Counted:
        return state._replace(counts=_add(state.counts, tokens, count))

    return init, process, update


def _add(counts: Array, tokens: Array, count: Array) -> Array:
    """Add the first `count` int32[B] of `tokens` int32[B, T] to the counts."""
    place = jnp.where(
        jnp.arange(tokens.shape[1]) < count[:, None], tokens, counts.shape[1]
    )  # an index past the end is dropped
    return jax.vmap(lambda counts, place: counts.at[place].add(1, mode="drop"))(counts, place)
