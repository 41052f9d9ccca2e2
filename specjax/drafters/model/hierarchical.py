"""Hierarchical speculation: a middle model verifies a small drafter, and the target verifies the middle model.

SpecMQuant: Zhang et al., Speculative Decoding Meets Quantization: Compatibility Evaluation and Hierarchical Framework
Design (2025), arXiv 2505.22179; Spector, Re: Accelerating LLM Inference with Staged Speculative Decoding (2023),
arXiv 2308.04623.

Rule: the middle model M samples one token, then decodes speculatively with its own drafter until the chain has
`min_tokens` tokens. The target verifies the chain with q_i = M(. | text, x_<i).
Guarantee: distribution. Every token i of the chain is drawn from M(. | text, x_<i). The existence of a token depends on
earlier tokens only, for any lossless rule of the inner verification.
Motivation: a wide tree costs the target more than a short chain, and it is cheap for the middle model.
Deviation: M's own first token ("draft model start") is an option of the released code and the default here. It costs a
pass of M in each step. With `own_token=False`, as in the paper, the inner drafter drafts directly below the root. M
then needs an extra pass for missing tokens only after the target has accepted a whole chain.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.branching import narrow_or_wide
from specjax.arrays.indexing import first_largest
from specjax.catalog import Method, Option
from specjax.drafters.making import make_inner_drafter
from specjax.drafters.model.middle_chain import ChainRule, FirstToken, draft_chain, make_rule, skip_chain
from specjax.drafters.model.two_model import caught_up, feed_last
from specjax.engine.prefill import prefill_and_read
from specjax.engine.prepare import check_pair
from specjax.models.requirements import check_rewinds
from specjax.models.vocabulary import match_vocabulary
from specjax.numerics import sampling
from specjax.retrieval.datastore import Datastore
from specjax.trees.contracts import verify_widths
from specjax.types import (
    Array,
    Context,
    Drafter,
    Hooks,
    Model,
    PyTree,
    Target,
    TokenTree,
    Traits,
    TreeSize,
)

METHOD = Method(
    name="hierarchical",
    kind="drafter",
    guarantee="distribution",
    summary="drafts a chain with a smaller model, which itself uses another drafter such as prompt lookup",
    paper="SpecMQuant 2025, arXiv 2505.22179; Spector, Re 2023, arXiv 2308.04623",
    needs=frozenset({"draft"}),
    takes=frozenset({"datastore"}),
    options=(
        Option("min_tokens", "int", 6, "drafted tokens after which the draft ends"),
        Option(
            "own_token",
            "yes_or_no",
            True,
            "sample the first drafted token from the smaller model without an inner draft",
        ),
        Option("inner", "drafter", "prompt_lookup", "drafter for the smaller model, such as suffix:7"),
    ),
    factory="make_hierarchical",
    arguments=("draft",),
)


class State(NamedTuple):
    cache: PyTree  # cache of the middle model
    draft: PyTree  # state of the inner drafter
    num_cached: Array  # int32[B], number of tokens in the cache


def hierarchical(middle: Target, inner: Drafter, *, min_tokens: int = 6, own_token: bool = True) -> Drafter:
    """Draft a chain of tokens from `middle`; its length is `min_tokens` to `min_tokens` + depth of the inner draft.

    Args:
      inner: the drafter of `middle`. A `two_model` with `lag=4` (3 without `own_token`) needs no extra pass for tokens
        that its cache lacks.
      min_tokens: length of the chain at which drafting ends; 6 in the released script.
      own_token: sample the first token of the chain from the middle model, without an inner draft.

    State: the middle model's cache and the inner drafter's state. The inner drafter reads the middle model's outputs
    for the prompt. Raises: UsageError if min_tokens < 1.
    """
    rule = make_rule(inner, min_tokens, "hierarchical")
    check_pair(middle, inner)
    check_rewinds(middle.model, "the middle model of hierarchical")
    config = _Config(middle.model, rule, own_token)
    return _functions(config).replace(params=(middle.params, inner.params))


def make_hierarchical(
    draft: Target, *, inner: str | Drafter = "prompt_lookup", datastore: Datastore | None = None, **options
) -> Drafter:
    """Return `hierarchical` with an inner drafter by name."""
    return hierarchical(draft, make_inner_drafter(inner, draft, datastore), **options)


class _Config(NamedTuple):
    model: Model  # the middle model
    rule: ChainRule
    own_token: bool

    @property
    def lag(self) -> int:
        """Return the number of last tokens of the text that M reads again in each step.

        Its own first token needs the root. After full acceptance its cache lacks the last token of the chain too.
        """
        return 2 if self.own_token else 1


@functools.cache
def _functions(config: _Config) -> Drafter:
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(config.rule.longest + 1, config.rule.longest),
        init=functools.partial(_init, config),
        traits=Traits(draws="chain", widths=verify_widths(range(1, config.rule.longest + 2))),
        hooks=Hooks(
            export=functools.partial(_export, config) if config.rule.inner.hooks.export else None,
            axes=lambda state: batch_axes.rows_first(state)._replace(
                cache=config.model.axes(state.cache), draft=config.rule.inner.hooks.axes(state.draft)
            ),
        ),
    )


def _init(config: _Config, params, context: Context) -> State:
    model, (middle, inner) = match_vocabulary(config.model, context.target), params
    room = context.tokens.shape[1] + config.rule.longest + config.rule.inner.num_nodes
    cache = model.start_cache(middle, model.select_inputs(context.inputs), context.length, room)
    num_cached = jnp.maximum(context.length - 1, 0)
    below = context._replace(target=Target(model, middle))
    draft, read = config.rule.inner.init(inner, below), config.rule.inner.hooks.prefill
    see = lambda draft, *chunk: draft if read is None else read(inner, draft, below, *chunk)
    cache, draft = prefill_and_read(
        model, middle, cache, context.tokens, num_cached, see, draft, taps=config.rule.inner.traits.taps
    )
    return State(cache, draft, num_cached)


def _export(config: _Config, params, state: State) -> tuple[PyTree, PyTree]:
    remember = config.rule.inner.hooks.export
    assert remember is not None
    return params[0], remember(params[1], state.draft)


def _propose(config: _Config, params, keys, state: State, context: Context, limit: Array) -> tuple[TokenTree, State]:
    # The cache may count drafted tokens that the target rejected; cut it to the text without the last `lag` tokens.
    state = state._replace(num_cached=jnp.minimum(state.num_cached, jnp.maximum(context.length - config.lag, 0)))
    draft = functools.partial(_draft, config, params, keys, context, limit)
    skip = functools.partial(_skip_draft, config, params, keys, context, jax.eval_shape(draft, state)[1])
    state, tree = narrow_or_wide(jnp.all(limit <= 0), skip, draft, state)
    return tree, state


def _skip_draft(
    config: _Config, params, keys, context: Context, shapes: TokenTree, state: State
) -> tuple[State, TokenTree]:
    """Skip the draft and the pass of the middle model."""
    middle = Target(match_vocabulary(config.model, context.target), params[0])
    draft, tree = skip_chain(config.rule, middle, params[1], keys, context, state.cache, state.draft, shapes)
    return state._replace(draft=draft), tree


def _draft(config: _Config, params, keys, context: Context, limit: Array, state: State) -> tuple[State, TokenTree]:
    model, length = match_vocabulary(config.model, context.target), context.length
    num_target = jnp.maximum(length - config.lag, 0)
    cache = model.rewind_cache(state.cache, state.num_cached)
    cache = caught_up(model, params[0], cache, context, jnp.zeros_like(length), state.num_cached, num_target)
    first = None
    if config.own_token:
        first, cache = _sample_own_token(config, params[0], keys, cache, context)
    middle = Target(model, params[0])
    inner, tree = draft_chain(config.rule, middle, params[1], keys, context, limit, cache, state.draft, first)
    return State(inner.cache, inner.draft, inner.length - 1), tree


def _sample_own_token(config: _Config, params, keys, cache: PyTree, context: Context) -> tuple[FirstToken, PyTree]:
    """Feed the last tokens; return M's own next token, and the cache with the whole text."""
    model, length, lag = match_vocabulary(config.model, context.target), context.length, config.lag
    last, pending = feed_last(model, params, cache, context, length, lag)
    path = jnp.where(length[:, None] == 1, 1, jnp.arange(lag))  # a text of one token has only the last one
    cache = model.commit(cache, pending, path, jnp.minimum(length, lag))
    log_q = sampling.warp(last.logits, context.sampling)
    if context.sampling.temperature is None:
        return FirstToken(first_largest(log_q), log_q), cache
    if context.noise is not None:
        token_keys = sampling.node_keys(context.noise, length, jnp.zeros_like(length)[:, None])[:, 0]
    else:
        token_keys = sampling.fold_in(keys, jnp.zeros_like(length))
    return FirstToken(sampling.draw(token_keys, log_q), log_q), cache
