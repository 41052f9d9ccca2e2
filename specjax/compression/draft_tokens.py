"""The tokens that a draft model writes after a prompt, before it is compressed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.texts import causal_mask, in_order
from specjax.types import Array, PyTree, Target


def look_ahead(draft: Target, tokens: Array, cache: PyTree, lengths: Array, count: int) -> tuple[Array, PyTree]:
    """Return prompts int32[B, L] with `count` greedy tokens of the draft, and the cache of all but the last one.

    Args:
      cache: the first `lengths - 1` tokens or more. Both have slots for the new tokens.
    """
    model, batch = draft.model, len(lengths)
    mask, path, row = causal_mask(batch, 1), in_order(batch, 1), jnp.arange(batch)

    def step(i: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        tokens, cache = carry
        places = (lengths - 1 + i)[:, None]
        new = take_along(tokens, places, 1)
        output, pending = model.forward(draft.params, new, cache, positions=places, mask=mask)
        likeliest = jnp.argmax(output.logits[:, 0], -1).astype(jnp.int32)
        return tokens.at[row, lengths + i].set(likeliest), model.commit(cache, pending, path, jnp.ones_like(lengths))

    return jax.lax.fori_loop(0, count, step, (tokens, model.rewind_cache(cache, lengths - 1)))
