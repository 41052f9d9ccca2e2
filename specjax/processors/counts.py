"""Penalties: processors for which all that counts of a text is how often each token is in it.

The counts of a node are those of the committed text and of the path to it. They are never laid out as [B, N, V]: all
rows of the logits are changed by the counts of the committed text, which differ from a node's own only at the tokens on
its path. At those, N x N of them at most, the logits are changed anew.
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
"""(strength, count, logit) -> logit, element by element."""


class Counted(NamedTuple):
    """What a penalty knows of the text so far."""

    counts: Array  # int32[B, V]
    strength: Array  # float32[B]


def by_count(change: Change, strength: Any, *, prompt: bool) -> Processor:
    """The processor that changes the logit of each token by how often it is in the text; `prompt`: and in the prompt.

    strength: a number, or one per row.
    """
    init, process, update = _functions(change, prompt)
    rows = jnp.atleast_1d(jnp.asarray(strength, jnp.float32))
    return Processor(process=process, init=init, update=update, settings=rows)


@functools.cache
def _functions(change: Change, prompt: bool):
    def init(params, strength: Array, tokens: Array, length: Array, vocab_size: int) -> Counted:
        none = jnp.zeros((len(length), vocab_size), jnp.int32)
        return Counted(_add(none, tokens, length) if prompt else none, strength)

    def process(params, state: Counted, tree: TokenTree, above: Array, logits: Array) -> Array:
        strength = state.strength[:, None, None]
        changed = change(strength, state.counts[:, None], logits)
        batch, n, vocab = logits.shape
        if n == 1:
            return changed
        drafted = above & (jnp.arange(n) > 0)  # bool[B, N, N]: of those above node i, all but the root
        known = jnp.clip(tree.tokens, 0, vocab - 1)  # int32[B, N]; nodes of other tokens are never accepted
        equal = known[:, :, None] == known[:, None, :]
        # int32[B, N, N]: how often token j is among the nodes above node i; whole numbers, exact in any precision
        on_path = (drafted.astype(jnp.float32) @ equal.astype(jnp.float32)).astype(jnp.int32)
        at = jnp.broadcast_to(known[:, None], drafted.shape)  # token j, in row i
        anew = change(strength, take_along(state.counts, known, 1)[:, None] + on_path, take_along(logits, at, 2))
        rows, nodes = jnp.arange(batch)[:, None, None], jnp.arange(n)[:, None]
        return changed.at[rows, nodes, jnp.where(drafted, at, vocab)].set(anew, mode="drop")

    def update(params, state: Counted, tokens: Array, count: Array) -> Counted:
        return state._replace(counts=_add(state.counts, tokens, count))

    return init, process, update


def _add(counts: Array, tokens: Array, count: Array) -> Array:
    """With the first `count` int32[B] of `tokens` int32[B, T]."""
    place = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, counts.shape[1])  # behind the end: dropped
    return jax.vmap(lambda counts, place: counts.at[place].add(1, mode="drop"))(counts, place)
