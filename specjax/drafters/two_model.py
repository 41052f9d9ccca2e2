"""Two-model speculative decoding: a smaller model of the same vocabulary drafts a chain.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2023), arXiv 2211.17192;
Chen et al.: Accelerating Large Language Model Decoding with Speculative Sampling (2023), arXiv 2302.01318.

Rule: x_i ~ q(. | text, x_<i) for i = 1 ... num_tokens, with the target's own temperature, top-k and top-p.
Guarantee: distribution (verified with the q that was sampled).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.errors import UsageError
from specjax.prefill import prefill
from specjax.tree import chain
from specjax.types import Context, Drafter, Model, Target


def two_model(draft: Target, num_tokens: int = 4) -> Drafter:
    """A chain of `num_tokens` tokens drawn from `draft` (greedily, if decoding is greedy).

    State: the draft's key/value cache. Raises: UsageError if num_tokens < 1.
    """
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    return _functions(draft.model, num_tokens).replace(params=draft.params)


@functools.cache
def _functions(model: Model, num_tokens: int) -> Drafter:
    def init(params, context: Context):
        batch, buffer = context.tokens.shape
        cache = model.init_cache(batch, buffer + num_tokens)
        return prefill(model, params, cache, context.tokens, jnp.maximum(context.length - 2, 0))

    def forward(params, cache, tokens, count):
        """Feed `count[b]` of the T tokens after the cache; the logits after the last of them, and the longer cache."""
        batch, t = tokens.shape
        positions = cache.length[:, None] + jnp.arange(t)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (batch, t, t))
        output, pending = model.forward(params, tokens, cache, positions=positions, mask=mask)
        logits = jnp.take_along_axis(output.logits, (count - 1)[:, None, None], 1)[:, 0]
        path = jnp.broadcast_to(jnp.arange(t), (batch, t))
        return logits, model.commit(cache, pending, path, count)

    def draw(keys, depth, logits, context: Context):
        """The next drafted token and the warped logits it was drawn from (None when greedy)."""
        if context.sampling.temperature is None:
            return jnp.argmax(logits, -1).astype(jnp.int32), None
        logits = sampling.warp(logits, context.sampling)
        return sampling.draw(sampling.fold_in(keys, jnp.full(keys.shape, depth)), logits), logits

    def propose(params, keys, cache, context: Context, limit):
        # The cache lags two tokens: the root is always new, the one before it is new after full acceptance. Feeding
        # both every time costs as much as feeding one and keeps the rows of a batch in step.
        start = jnp.maximum(context.length - 2, 0)
        cache = cache._replace(length=start)
        pair = jnp.take_along_axis(context.tokens, start[:, None] + jnp.arange(2), 1)
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)
        logits, cache = forward(params, cache, pair, context.length - start)
        first, law = draw(keys, 1, logits, context)

        def body(carry, depth):
            cache, token = carry
            logits, cache = forward(params, cache, token[:, None], jnp.ones_like(token))
            token, law = draw(keys, depth, logits, context)
            return (cache, token), (token, law)

        (cache, _), (rest, laws) = jax.lax.scan(body, (cache, first), jnp.arange(2, num_tokens + 1))
        tokens = jnp.concatenate([root, first[:, None], rest.T], 1)
        valid = jnp.arange(num_tokens + 1) <= limit[:, None]
        if law is None:
            return chain(tokens, valid), cache
        leaf = jnp.zeros_like(law)[:, None]
        return chain(tokens, valid, jnp.concatenate([law[:, None], laws.swapaxes(0, 1), leaf], 1)), cache

    return Drafter(
        init=init,
        propose=propose,
        update=lambda params, cache, tree, verdict, output: cache,
        num_nodes=num_tokens + 1,
        max_depth=num_tokens,
        draws="chain",
    )
