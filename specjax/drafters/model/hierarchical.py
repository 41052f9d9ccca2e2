"""Hierarchical speculation: a tiny drafter, verified by a middle model, drafts the chain that the target verifies.

SpecMQuant: Zhang et al., Speculative Decoding Meets Quantization: Compatibility Evaluation and Hierarchical Framework
Design (2025), arXiv 2505.22179; Spector, Re: Accelerating LLM Inference with Staged Speculative Decoding (2023),
arXiv 2308.04623.

Rule: the middle model M draws one token itself, then decodes speculatively with its own drafter until the chain has
`min_tokens` tokens. The target verifies the chain with q_i = M(. | text, x_<i).
Guarantee: distribution. Given that token i exists it has the law M(. | text, x_<i): whether it exists depends on the
tokens before it only, whatever lossless rule the inner verification uses.
Why: a wide tree costs the target more than a short chain; the middle model can afford it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.controllers import fixed
from specjax.drafters.model.two_model import feed_last
from specjax.engine.parts import Keep, Parts
from specjax.engine.prefill import prefill
from specjax.engine.step import step
from specjax.errors import UsageError
from specjax.indexing import first_largest, take_along
from specjax.trees.operations import chain
from specjax.types import Context, DecodeState, Drafter, Model, PyTree, Target
from specjax.verifiers import exact_verifier, sample_and_match

LAG = 2
"""Tokens of the text that the middle model reads anew: after full acceptance its cache lacks the last of the chain."""


class _State(NamedTuple):
    cache: PyTree  # of the middle model
    draft: PyTree  # of the inner drafter


def hierarchical(middle: Target, inner: Drafter, *, min_tokens: int = 6) -> Drafter:
    """Chains of `min_tokens` to `min_tokens` + depth of the inner draft tokens, drawn from `middle`.

    Args:
      inner: drafts for `middle`; a `two_model` needs `lag=4` here.
      min_tokens: stop drafting once the chain has so many; 6 in the released script.

    State: the middle model's cache and the inner drafter's state. Raises: UsageError if min_tokens < 1.
    """
    if min_tokens < 1:
        raise UsageError(f"min_tokens must be at least 1, not {min_tokens}")
    if middle.model.rewind is None:
        raise UsageError(f"the model {middle.model.name} cannot rewind its cache, as the middle one must")
    return _functions(middle.model, inner.replace(params=()), min_tokens).replace(params=(middle.params, inner.params))


@functools.cache
def _functions(model: Model, shape: Drafter, min_tokens: int) -> Drafter:
    longest = min_tokens + shape.max_depth

    def init(params, context: Context) -> _State:
        batch, buffer = context.tokens.shape
        cache = model.begin(params[0], context.inputs, batch, buffer + longest + shape.num_nodes)
        cache = prefill(model, params[0], cache, context.tokens, jnp.maximum(context.length - LAG, 0))
        return _State(cache, shape.init(params[1], context._replace(target=Target(model, params[0]))))

    def own_token(params, keys, cache: PyTree, context: Context):
        """Feed what the cache lacks: M's own next token [B], its law [B, V], and the cache with the whole text."""
        length = context.length
        assert model.rewind is not None
        cache = model.rewind(cache, jnp.maximum(length - LAG, 0))
        logits, pending = feed_last(model, params[0], cache, context, length, LAG)
        path = jnp.where(length[:, None] == 1, 1, jnp.arange(LAG))  # a text of one token has the last of the two only
        cache = model.commit(cache, pending, path, jnp.minimum(length, LAG))
        law = sampling.warp(logits, context.sampling)
        if context.sampling.temperature is None:
            return first_largest(law), law, cache
        if context.noise is not None:
            own = sampling.node_keys(context.noise, length, jnp.zeros_like(length)[:, None])[:, 0]
        else:
            own = sampling.fold_in(keys, jnp.zeros_like(length))
        return sampling.draw(own, law), law, cache

    def propose(params, keys, state: _State, context: Context, limit):
        batch, buffer = context.tokens.shape
        rows = jnp.arange(batch)
        is_greedy, coupled = context.sampling.temperature is None, context.noise is not None
        first, law, cache = own_token(params, keys, state.cache, context)
        wanted = context.length + jnp.minimum(min_tokens, jnp.maximum(limit, 1))
        parts = Parts(
            target=Target(model, params[0]),
            drafter=shape.replace(params=params[1]),
            verifier=sample_and_match if coupled else exact_verifier(shape, is_greedy),
            controller=fixed(),
            sampling=context.sampling,
            eos=jnp.zeros((0,), jnp.int32),
            coupled=coupled,
            keep=Keep(laws=not (is_greedy or coupled)),
        )
        inner = DecodeState(
            tokens=context.tokens.at[rows, context.length].set(first, mode="drop"),
            length=context.length + 1,
            done=context.length + 1 >= wanted,
            keys=keys if context.noise is None else context.noise,
            stop=context.length + longest,
            cache=cache,
            draft=state.draft,
            control=fixed().init(batch),
        )
        laws = None
        if parts.keep.laws:
            laws = jnp.zeros((batch, longest + 1, model.vocab_size)).at[:, 0].set(law)

        def more(carry):
            inner, laws = carry
            before = inner.length - context.length
            inner, info = step(parts, inner)
            if laws is not None and info.laws is not None:
                index = jnp.arange(info.laws.shape[1])
                place = jnp.where(index < info.emitted[:, None], before[:, None] + index, longest + 1)
                laws = laws.at[rows[:, None], place].set(info.laws, mode="drop")
            return inner._replace(done=inner.length >= wanted), laws

        inner, laws = jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), more, (inner, laws))
        place = context.length[:, None] - 1 + jnp.arange(longest + 1)
        tokens = take_along(inner.tokens, jnp.minimum(place, buffer - 1), 1)
        drafted = jnp.minimum(inner.length - context.length, limit)
        valid = jnp.arange(longest + 1) <= drafted[:, None]
        return chain(tokens, valid, laws), _State(inner.cache, inner.draft)

    return Drafter(
        init=init,
        propose=propose,
        axes=lambda state: _State(model.axes(state.cache), shape.axes(state.draft)),
        num_nodes=longest + 1,
        max_depth=longest,
        draws="chain",
    )
