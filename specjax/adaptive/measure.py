"""What a thinned model runs of a text, and how likely it holds it: one reading, no decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.engine.prefill import CHUNK, prefill
from specjax.models.variants.layer_skipping import SkippingPending
from specjax.types import Array, Model, Sublayers, Target


class Reading(NamedTuple):
    """Of answers, entry i of the pass that writes token i of the answer; those behind the last mean nothing."""

    ran: Sublayers  # bool[B, L, layers] each: the sublayers that it runs; for the first token all, as of a prompt
    logprobs: Array  # float32[B, L], of the token
    said: Array  # int32[B, L], the likeliest token


def read(
    target: Target, tokens: Array | Sequence[Sequence[int]], prompt: Array | Sequence[int]
) -> Reading:
    """What `target` does with texts `tokens` int32[B, L] whose first `prompt` int32[B] tokens, 1 or more, are given.

    What a token runs does not depend on those behind it, nor on how many are read at once. So this is what decoding
    these texts runs; a model that is not thinned runs all of its layers.
    """
    return _read(target.model, target.params, jnp.asarray(tokens, jnp.int32), jnp.asarray(prompt, jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _read(model: Model, params, tokens: Array, prompt: Array) -> Reading:
    batch, size = tokens.shape
    offset = jnp.arange(CHUNK)
    path = jnp.broadcast_to(offset, (batch, CHUNK))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), (batch, CHUNK, CHUNK))
    at = lambda place: take_along(tokens, jnp.minimum(place, size - 1), 1)

    def chunk(carry, _):
        cache, held = carry
        positions = held[:, None] + offset
        output, pending = model.forward(params, at(positions), cache, positions=positions, mask=mask)
        log_p = jax.nn.log_softmax(output.logits)
        logprobs = take_along(log_p, at(positions + 1)[..., None], 2)[..., 0]
        every = jnp.ones((*positions.shape, model.capabilities.num_layers), bool)
        ran = pending.ran if isinstance(pending, SkippingPending) else Sublayers(every, every)
        here = Reading(ran, logprobs, jnp.argmax(log_p, -1).astype(jnp.int32))
        count = jnp.clip(size - held, 0, CHUNK)
        return (model.commit(cache, pending, path, count), held + count), here

    cache = model.start_cache(params, None, prompt, size + CHUNK + 1)
    start = prefill(model, params, cache, tokens, prompt - 1), prompt - 1
    _, chunks = jax.lax.scan(chunk, start, None, -(-size // CHUNK))
    joined = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:]), chunks)
    return jax.tree.map(lambda x: x[:, :size], joined)


def share_run(ran: Sublayers, counts: Array, config) -> Array:
    """float32[]: which part of the weights of the layers the tokens `counts` bool[B, L] were multiplied with.

    config: of the whole model. The head, what the tests of a method cost, and keys and values that are propagated
    (`models.depth.Repair`) are not in it.
    """
    c = config
    attention = c.width * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    mlp = 3 * c.width * c.mlp_width
    work = attention * ran.attention + mlp * ran.mlp
    return jnp.sum(jnp.mean(work, -1) * counts) / (jnp.sum(counts) * (attention + mlp))
