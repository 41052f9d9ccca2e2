"""Logits of texts that a model reads in chunks."""

import jax
import jax.numpy as jnp
import numpy as np


def logits_in_chunks(target, texts, inputs, chunk):
    """Return the logits of texts of one length with these inputs, read in chunks of tokens."""
    model, (batch, length) = target.model, np.shape(texts)
    cache = jax.jit(model.init_cache, static_argnums=(2, 3))(target.params, inputs, batch, length + chunk)
    forward, logits = jax.jit(model.forward), []
    for start in range(0, length, chunk):
        part = jnp.array(texts)[:, start : start + chunk]
        size = part.shape[1]
        positions = jnp.broadcast_to(start + jnp.arange(size), part.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
        output, pending = forward(target.params, part, cache, positions=positions, mask=mask)
        cache = model.commit(cache, pending, jnp.broadcast_to(jnp.arange(size), part.shape), jnp.full(batch, size))
        logits.append(output.logits)
    return np.concatenate(logits, 1)
