"""Reading prompts into a cache, in chunks of fixed size."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Array, Model, PyTree

CHUNK = 128
"""Tokens per pass. SmolLM2 on 2 cores reads a 900-token prompt as fast with 128 as with 512; the scores of one layer,
the largest temporary, are a quarter."""


def prefill(model: Model, params: PyTree, cache: PyTree, tokens: Array, count: Array) -> PyTree:
    """Commit the first `count[b]` of `tokens` int32[B, L] to an empty cache of more than max(count) + CHUNK slots.

    Runs only as many chunks as the longest row needs, so padding of the buffer costs nothing. The logits are not used,
    and the compiler removes the head.
    """
    batch = tokens.shape[0]
    offset = jnp.arange(CHUNK)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), (batch, CHUNK, CHUNK))
    path = jnp.broadcast_to(offset, (batch, CHUNK))

    def body(carry):
        start, cache = carry
        window = jnp.take(tokens, start + offset, axis=1, mode="clip")
        positions = jnp.broadcast_to(start + offset, (batch, CHUNK))
        _, pending = model.forward(params, window, cache, positions=positions, mask=mask)
        return start + CHUNK, model.commit(cache, pending, path, jnp.clip(count - start, 0, CHUNK))

    longest = jnp.max(count)
    return jax.lax.while_loop(lambda carry: carry[0] < longest, body, (jnp.int32(0), cache))[1]
