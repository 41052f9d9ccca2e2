"""Logits of whole texts in one pass."""

import jax.numpy as jnp


def whole_text_logits(model, params, tokens):
    """Return the logits [B, T, V] of tokens int32[B, T]."""
    batch, count = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (batch, count, count))
    positions = jnp.broadcast_to(jnp.arange(count), tokens.shape)
    cache = model.init_cache(params, None, batch, 128)
    return model.forward(params, tokens, cache, positions=positions, mask=mask)[0].logits
