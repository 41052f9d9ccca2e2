"""Adaptation of a draft model to a target with the same tokenizer but another number of output ids.

Padding of the embedding or a few special tokens cause such differences. Qwen2.5 0.5B has 151,936 ids and 7B 152,064;
Gemma 3 270M has 262,144 and 4B 262,208.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.types import Appended, Array, Mixture, Model, Stream, Target


def match_vocabulary(model: Model, target: Target | None) -> Model:
    """Return a draft model with the target's ids, or the model itself if there is no target."""
    return model if target is None else resize_vocabulary(model, target.model.vocab_size)


@functools.cache
def resize_vocabulary(model: Model, size: int) -> Model:
    """Return `model` for texts of `size` ids. Equal arguments return the same object.

    Ids that the model lacks have no probability, and it reads its last id in their place. Logits of ids that only it
    has are cut off, so softmax gives their probability to the others.
    """
    num_missing = size - model.vocab_size
    if num_missing == 0:
        return model

    def clip_ids(tokens):
        if isinstance(tokens, Mixture):
            return tokens._replace(ids=clip_ids(tokens.ids))
        if isinstance(tokens, Appended):
            return tokens._replace(tokens=clip_ids(tokens.tokens))
        return tokens if isinstance(tokens, Stream) else jnp.minimum(tokens, model.vocab_size - 1)

    def fit_logits(logits: Array) -> Array:
        if num_missing < 0:
            return logits[..., :size]
        return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, num_missing)], constant_values=-jnp.inf)

    def forward(params, tokens, cache, **options):
        output, pending = model.forward(params, clip_ids(tokens), cache, **options)
        return output._replace(logits=fit_logits(output.logits)), pending

    def wrap_head(head):
        return None if head is None else lambda params, x: fit_logits(head(params, x))

    embed = model.embed
    return model._replace(
        forward=forward,
        vocab_size=size,
        embed=None if embed is None else lambda params, tokens: embed(params, clip_ids(tokens)),
        unembed=wrap_head(model.unembed),
        head=wrap_head(model.head),
        best=None,
    )
