"""Layer use and log-probabilities of a thinned model over given texts, from one pass without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.engine.prefill import CHUNK, prefill
from specjax.models.skipping.policy import SkippingPending
from specjax.types import Array, Model, Sublayers, Target


class Reading(NamedTuple):
    """Layer use and log-probabilities of answers.

    Entry i belongs to the pass that predicts token i of the answer. Entries after the last token are undefined.
    """

    ran: Sublayers  # bool[B, L, layers] each, sublayers that ran; entry 0 has all, as its input is a prompt token
    logprobs: Array  # float32[B, L], log-probability of the token
    likeliest: Array  # int32[B, L], the most likely token


@with_standard_modes
def read(target: Target, tokens: Array | Sequence[Sequence[int]], prompt: Array | Sequence[int]) -> Reading:
    """Return the layer use and log-probabilities of `target` on texts `tokens` int32[B, L].

    prompt: int32[B], prompt lengths of 1 or more. The layers of a token do not depend on later tokens or on the chunk
    size. The result is therefore the same as in decoding these texts. A model without a depth policy runs all layers.
    """
    return _read(target.model, target.params, jnp.asarray(tokens, jnp.int32), jnp.asarray(prompt, jnp.int32))


@jit(static_argnums=0)
def _read(model: Model, params, tokens: Array, prompt: Array) -> Reading:
    batch, size = tokens.shape
    offset = jnp.arange(CHUNK)
    path = jnp.broadcast_to(offset, (batch, CHUNK))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), (batch, CHUNK, CHUNK))
    at = lambda place: take_along(tokens, jnp.minimum(place, size - 1), 1)

    def chunk(carry, _):
        cache, num_read = carry
        positions = num_read[:, None] + offset
        output, pending = model.forward(params, at(positions), cache, positions=positions, mask=mask)
        log_p = jax.nn.log_softmax(output.logits)
        logprobs = take_along(log_p, at(positions + 1)[..., None], 2)[..., 0]
        every = jnp.ones((*positions.shape, model.capabilities.num_layers), bool)
        ran = pending.ran if isinstance(pending, SkippingPending) else Sublayers(every, every)
        reading = Reading(ran, logprobs, jnp.argmax(log_p, -1).astype(jnp.int32))
        count = jnp.clip(size - num_read, 0, CHUNK)
        return (model.commit(cache, pending, path, count), num_read + count), reading

    cache = model.start_cache(params, None, prompt, size + CHUNK + 1)
    start = prefill(model, params, cache, tokens, prompt - 1), prompt - 1
    _, chunks = jax.lax.scan(chunk, start, None, -(-size // CHUNK))
    joined = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:]), chunks)
    return jax.tree.map(lambda x: x[:, :size], joined)


def share_run(ran: Sublayers, counts: Array, config) -> Array:
    """Return float32[]: the share of the layers' weights used by the tokens `counts` bool[B, L].

    config: the full model's. The share excludes the output head, the tests of a method, and propagated keys and values
    (`specjax.models.skipping.policy.Repair`).
    """
    c = config
    attention = c.width * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    mlp = 3 * c.width * c.mlp_width
    work = attention * ran.attention + mlp * ran.mlp
    return jnp.sum(jnp.mean(work, -1) * counts) / (jnp.sum(counts) * (attention + mlp))
