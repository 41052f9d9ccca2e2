"""Two models of one tokenizer whose outputs differ in size, as pads of the embedding or a few special tokens make them.

Qwen2.5 0.5B has 151,936 ids and 7B 152,064; Gemma 3 270M has 262,144 and 4B 262,208.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.types import Appended, Array, Mixture, Model, Stream, Target


def beside(model: Model, target: Target | None) -> Model:
    """A draft model with the target's ids; as it is where no target is known."""
    return model if target is None else of_vocabulary(model, target.model.vocab_size)


@functools.cache
def of_vocabulary(model: Model, size: int) -> Model:
    """`model` for texts of `size` ids: the same object for equal arguments.

    Ids that it lacks have no mass, and it reads its last one in their place. Those that only it has are cut off:
    softmax gives their mass to the others.
    """
    missing = size - model.vocab_size
    if missing == 0:
        return model

    def known(tokens):
        if isinstance(tokens, Mixture):
            return tokens._replace(ids=known(tokens.ids))
        if isinstance(tokens, Appended):
            return tokens._replace(tokens=known(tokens.tokens))
        return tokens if isinstance(tokens, Stream) else jnp.minimum(tokens, model.vocab_size - 1)

    def fit(logits: Array) -> Array:
        if missing < 0:
            return logits[..., :size]
        return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)

    def forward(params, tokens, cache, **options):
        output, pending = model.forward(params, known(tokens), cache, **options)
        return output._replace(logits=fit(output.logits)), pending

    def fitted(head):
        return None if head is None else lambda params, x: fit(head(params, x))

    embed = model.embed
    return model._replace(
        forward=forward,
        vocab_size=size,
        embed=None if embed is None else lambda params, tokens: embed(params, known(tokens)),
        unembed=fitted(model.unembed),
        head=fitted(model.head),
    )
