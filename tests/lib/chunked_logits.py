"""Logits of texts that a model reads in chunks."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import texts


def logits_in_chunks(target, prompts, inputs, chunk):
    """Return the logits of texts of one length with these inputs, read in chunks of tokens."""
    model, (batch, length) = target.model, np.shape(prompts)
    cache = jax.jit(model.init_cache, static_argnums=(2, 3))(target.params, inputs, batch, length + chunk)
    logits = []

    @jax.jit
    def forward(params, part, cache, positions):
        mask = texts.causal_mask(*part.shape)
        mask = mask if model.capabilities.sees_ahead else texts.traced_mask(mask)
        return model.forward(params, part, cache, positions=positions, mask=mask)

    for start in range(0, length, chunk):
        part = jnp.array(prompts)[:, start : start + chunk]
        size = part.shape[1]
        positions = jnp.broadcast_to(start + jnp.arange(size), part.shape)
        output, pending = forward(target.params, part, cache, positions)
        cache = model.commit(cache, pending, jnp.broadcast_to(jnp.arange(size), part.shape), jnp.full(batch, size))
        logits.append(output.logits)
    return np.concatenate(logits, 1)
