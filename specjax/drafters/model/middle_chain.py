"""The chain of a middle model that decodes speculatively, and that the target verifies afterwards."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.controllers.fixed import fixed
from specjax.engine.job import Keep, Parts
from specjax.engine.step import LOOP, step
from specjax.errors import UsageError
from specjax.trees.operations import chain, root_only
from specjax.types import Array, Context, DecodeState, Drafter, PyTree, Target, TokenTree, Verdict
from specjax.verifiers import exact_verifier, sample_and_match


class ChainRule(NamedTuple):
    """The inner drafter of a middle model, and the length at which a chain ends."""

    inner: Drafter  # without its parameters
    min_tokens: int

    @property
    def longest(self) -> int:
        """Return the maximum length of a chain; the last inner step may begin at `min_tokens` - 1 tokens."""
        return self.min_tokens + self.inner.max_depth


def make_rule(inner: Drafter, min_tokens: int, user: str) -> ChainRule:
    """Return the rule of a chain. Raises: UsageError for a length below 1, and for an inner drafter without rewinds."""
    if min_tokens < 1:
        raise UsageError(f"min_tokens must be at least 1, not {min_tokens}")
    if not inner.traits.rewinds:
        raise UsageError(
            f"the inner drafter's model cannot rewind its cache, which {user} needs after a rejected draft; "
            "choose another inner drafter, such as prompt_lookup"
        )
    return ChainRule(inner.replace(params=()), min_tokens)


class FirstToken(NamedTuple):
    """A token that the middle model samples without an inner draft."""

    token: Array  # int32[B]
    log_q: Array  # float32[B, V]


def draft_chain(
    rule: ChainRule,
    middle: Target,
    params: PyTree,
    keys: Array,
    context: Context,
    limit: Array,
    cache: PyTree,
    draft: PyTree,
    first: FirstToken | None = None,
) -> tuple[DecodeState, TokenTree]:
    """Draft a chain of `middle`, whose tokens have its distribution. Return its last state and the chain.

    Args:
      params: the parameters of the inner drafter. cache: the cache of `middle`, with all tokens of the text but the
        last one, and with `first` with all of them. draft: the state of the inner drafter.
    """
    tokens, length, log_q = context.tokens, context.length, None
    if first is not None:
        log_q = first.log_q
        tokens = tokens.at[jnp.arange(len(length)), length].set(first.token, mode="drop")
        length = length + 1
    # In each step the middle model reads at least the root.
    num_target = context.length + jnp.minimum(rule.min_tokens, jnp.maximum(limit, 1))
    parts = _parts(rule, middle, params, context)
    inner = DecodeState(
        tokens=tokens,
        length=length,
        done=length >= num_target,
        keys=keys if context.noise is None else context.noise,
        stop=context.length + rule.longest,
        cache=cache,
        draft=draft,
        control=parts.controller.init(len(length)),
        finite=jnp.ones(length.shape, bool),
    )
    rows_of_q = None
    if parts.keep.logits:
        rows_of_q = jnp.zeros((len(length), rule.longest + 1, middle.model.vocab_size))
    if rows_of_q is not None and log_q is not None:
        rows_of_q = rows_of_q.at[:, 0].set(log_q)
    inner, chain_log_q = _decode(parts, inner, num_target, context.length, rows_of_q)
    place = context.length[:, None] - 1 + jnp.arange(rule.longest + 1)
    tokens = take_along(inner.tokens, jnp.minimum(place, context.tokens.shape[1] - 1), 1)
    drafted = jnp.minimum(inner.length - context.length, limit)
    valid = jnp.arange(rule.longest + 1) <= drafted[:, None]
    return inner, chain(tokens, valid, chain_log_q)


def skip_chain(
    rule: ChainRule,
    middle: Target,
    params: PyTree,
    keys: Array,
    context: Context,
    cache: PyTree,
    draft: PyTree,
    shapes: TokenTree,
) -> tuple[PyTree, TokenTree]:
    """Skip the draft and the pass of the middle model; the inner drafter reads only the length of the text."""
    below = context._replace(cache=cache, target=middle, unlimited=None)
    tree, drafted = rule.inner.propose(params, keys, draft, below, jnp.zeros_like(context.length))
    path = jnp.full_like(tree.parents, -1)
    mask = jnp.zeros((*path.shape, path.shape[1]), bool)
    taps = {"taps": rule.inner.traits.taps} if rule.inner.traits.taps else {}
    read = functools.partial(middle.model.forward, positions=path, mask=mask, **taps)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    output = zeros(jax.eval_shape(read, middle.params, tree.tokens, cache)[0])
    verdict = Verdict(path, jnp.zeros_like(context.length), jnp.zeros_like(context.length))
    none = tree._replace(valid=jnp.zeros_like(tree.valid))
    observation = rule.inner.observe(params, drafted, below, none, verdict, output)
    return rule.inner.update(params, drafted, observation, verdict), root_only(context.root, shapes)


def _parts(rule: ChainRule, middle: Target, params: PyTree, context: Context) -> Parts:
    """Return the job's parts with the middle model as the target of the inner drafter."""
    is_greedy, coupled = context.sampling.temperature is None, context.noise is not None
    return Parts(
        loop=LOOP,
        target=middle,
        drafter=rule.inner.replace(params=params),
        verifier=sample_and_match if coupled else exact_verifier(rule.inner, is_greedy),
        controller=fixed(),
        sampling=context.sampling,
        eos=jnp.zeros((0,), jnp.int32),
        coupled=coupled,
        keep=Keep(logits=not (is_greedy or coupled)),
    )


def _decode(
    parts: Parts, state: DecodeState, num_target: Array, start: Array, log_q: Array | None
) -> tuple[DecodeState, Array | None]:
    """Decode with the inner drafter until each row has `num_target` int32[B] tokens.

    Args:
      start: int32[B], first position of the chain.
      log_q: float32[B, size, V], log q of the chain's tokens, or None. The new tokens' rows are written to it.
    """

    def more(carry):
        state, log_q = carry
        num_drafted = state.length - start
        state, info = step(parts, state)
        if log_q is not None and info.logits is not None:
            index = jnp.arange(info.logits.shape[1])
            place = jnp.where(index < info.emitted[:, None], num_drafted[:, None] + index, log_q.shape[1])
            log_q = log_q.at[jnp.arange(len(log_q))[:, None], place].set(info.logits, mode="drop")
        return state._replace(done=state.length >= num_target), log_q

    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), more, (state, log_q))
