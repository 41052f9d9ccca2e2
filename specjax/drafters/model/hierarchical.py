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
from specjax.arrays.indexing import first_largest, take_along
from specjax.catalog import Method, Option
from specjax.controllers.fixed import fixed
from specjax.drafters.making import make_inner_drafter
from specjax.drafters.model.two_model import caught_up, feed_last
from specjax.engine.job import Keep, Parts
from specjax.engine.prefill import prefill_and_read
from specjax.engine.prepare import check_pair
from specjax.engine.step import LOOP, step
from specjax.errors import UsageError
from specjax.models.requirements import check_rewinds
from specjax.models.vocabulary import match_vocabulary
from specjax.numerics import sampling
from specjax.retrieval.datastore import Datastore
from specjax.trees.contracts import verify_widths
from specjax.trees.operations import chain, root_only
from specjax.types import (
    Array,
    Context,
    DecodeState,
    Drafter,
    Hooks,
    Model,
    PyTree,
    Target,
    TokenTree,
    Traits,
    TreeSize,
    Verdict,
)
from specjax.verifiers import exact_verifier, sample_and_match

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
    if min_tokens < 1:
        raise UsageError(f"min_tokens must be at least 1, not {min_tokens}")
    check_pair(middle, inner)
    if not inner.traits.rewinds:
        raise UsageError(
            "the inner drafter's model cannot rewind its cache, which hierarchical needs after a rejected draft; "
            "choose another inner drafter, such as prompt_lookup"
        )
    check_rewinds(middle.model, "the middle model of hierarchical")
    config = _Config(middle.model, inner.replace(params=()), min_tokens, own_token)
    return _functions(config).replace(params=(middle.params, inner.params))


def make_hierarchical(
    draft: Target, *, inner: str | Drafter = "prompt_lookup", datastore: Datastore | None = None, **options
) -> Drafter:
    """Return `hierarchical` with an inner drafter by name."""
    return hierarchical(draft, make_inner_drafter(inner, draft, datastore), **options)


class _Config(NamedTuple):
    model: Model  # the middle model
    inner: Drafter  # without its parameters
    min_tokens: int
    own_token: bool

    @property
    def lag(self) -> int:
        """Return the number of last tokens of the text that M reads again in each step.

        Its own first token needs the root. After full acceptance its cache lacks the last token of the chain too.
        """
        return 2 if self.own_token else 1

    @property
    def longest(self) -> int:
        """Return the maximum length of a chain; the last inner step may begin at `min_tokens` - 1 tokens."""
        return self.min_tokens + self.inner.max_depth


@functools.cache
def _functions(config: _Config) -> Drafter:
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(config.longest + 1, config.longest),
        init=functools.partial(_init, config),
        traits=Traits(draws="chain", widths=verify_widths(range(1, config.longest + 2))),
        hooks=Hooks(
            export=functools.partial(_export, config) if config.inner.hooks.export else None,
            axes=lambda state: batch_axes.rows_first(state)._replace(
                cache=config.model.axes(state.cache), draft=config.inner.hooks.axes(state.draft)
            ),
        ),
    )


def _init(config: _Config, params, context: Context) -> State:
    model, (middle, inner) = match_vocabulary(config.model, context.target), params
    room = context.tokens.shape[1] + config.longest + config.inner.num_nodes
    cache = model.start_cache(middle, model.select_inputs(context.inputs), context.length, room)
    num_cached = jnp.maximum(context.length - 1, 0)
    below = context._replace(target=Target(model, middle))
    draft, read = config.inner.init(inner, below), config.inner.hooks.prefill
    see = lambda draft, *chunk: draft if read is None else read(inner, draft, below, *chunk)
    cache, draft = prefill_and_read(
        model, middle, cache, context.tokens, num_cached, see, draft, taps=config.inner.traits.taps
    )
    return State(cache, draft, num_cached)


def _export(config: _Config, params, state: State) -> tuple[PyTree, PyTree]:
    remember = config.inner.hooks.export
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
    """Skip the draft and the pass of the middle model; the inner drafter reads only the length of the text."""
    target = Target(match_vocabulary(config.model, context.target), params[0])
    below = context._replace(cache=state.cache, target=target, unlimited=None)
    tree, drafted = config.inner.propose(params[1], keys, state.draft, below, jnp.zeros_like(context.length))
    path = jnp.full_like(tree.parents, -1)
    mask = jnp.zeros((*path.shape, path.shape[1]), bool)
    taps = {"taps": config.inner.traits.taps} if config.inner.traits.taps else {}
    read = functools.partial(target.model.forward, positions=path, mask=mask, **taps)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    output = zeros(jax.eval_shape(read, params[0], tree.tokens, state.cache)[0])
    verdict = Verdict(path, jnp.zeros_like(context.length), jnp.zeros_like(context.length))
    none = tree._replace(valid=jnp.zeros_like(tree.valid))
    observation = config.inner.observe(params[1], drafted, below, none, verdict, output)
    draft = config.inner.update(params[1], drafted, observation, verdict)
    return state._replace(draft=draft), root_only(context.root, shapes)


def _draft(config: _Config, params, keys, context: Context, limit: Array, state: State) -> tuple[State, TokenTree]:
    model, length = match_vocabulary(config.model, context.target), context.length
    num_target = jnp.maximum(length - config.lag, 0)
    cache = model.rewind_cache(state.cache, state.num_cached)
    cache = caught_up(model, params[0], cache, context, jnp.zeros_like(length), state.num_cached, num_target)
    tokens, log_q = context.tokens, None
    if config.own_token:
        first, log_q, cache = _sample_own_token(config, params[0], keys, cache, context)
        tokens = tokens.at[jnp.arange(len(first)), length].set(first, mode="drop")
        length = length + 1
    # In each step M reads at least the root.
    num_target = context.length + jnp.minimum(config.min_tokens, jnp.maximum(limit, 1))
    parts = _parts(config, params, context)
    inner = DecodeState(
        tokens=tokens,
        length=length,
        done=length >= num_target,
        keys=keys if context.noise is None else context.noise,
        stop=context.length + config.longest,
        cache=cache,
        draft=state.draft,
        control=parts.controller.init(len(length)),
        finite=jnp.ones(length.shape, bool),
    )
    rows_of_q = jnp.zeros((len(length), config.longest + 1, model.vocab_size)) if parts.keep.logits else None
    if rows_of_q is not None and log_q is not None:
        rows_of_q = rows_of_q.at[:, 0].set(log_q)
    inner, chain_log_q = _decode(parts, inner, num_target, context.length, rows_of_q)
    place = context.length[:, None] - 1 + jnp.arange(config.longest + 1)
    tokens = take_along(inner.tokens, jnp.minimum(place, context.tokens.shape[1] - 1), 1)
    drafted = jnp.minimum(inner.length - context.length, limit)
    valid = jnp.arange(config.longest + 1) <= drafted[:, None]
    return State(inner.cache, inner.draft, inner.length - 1), chain(tokens, valid, chain_log_q)


def _sample_own_token(config: _Config, params, keys, cache: PyTree, context: Context) -> tuple[Array, Array, PyTree]:
    """Feed the last tokens; return M's own next token [B], its log q [B, V], and the cache with the whole text."""
    model, length, lag = match_vocabulary(config.model, context.target), context.length, config.lag
    last, pending = feed_last(model, params, cache, context, length, lag)
    path = jnp.where(length[:, None] == 1, 1, jnp.arange(lag))  # a text of one token has only the last one
    cache = model.commit(cache, pending, path, jnp.minimum(length, lag))
    log_q = sampling.warp(last.logits, context.sampling)
    if context.sampling.temperature is None:
        return first_largest(log_q), log_q, cache
    if context.noise is not None:
        token_keys = sampling.node_keys(context.noise, length, jnp.zeros_like(length)[:, None])[:, 0]
    else:
        token_keys = sampling.fold_in(keys, jnp.zeros_like(length))
    return sampling.draw(token_keys, log_q), log_q, cache


def _parts(config: _Config, params, context: Context) -> Parts:
    """Return the job's parts with M as the target of the inner drafter."""
    is_greedy, coupled = context.sampling.temperature is None, context.noise is not None
    return Parts(
        loop=LOOP,
        target=Target(match_vocabulary(config.model, context.target), params[0]),
        drafter=config.inner.replace(params=params[1]),
        verifier=sample_and_match if coupled else exact_verifier(config.inner, is_greedy),
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
