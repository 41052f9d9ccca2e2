"""TriForce: a small model drafts for the target over a part of its cache, which drafts for the target over all of it.

Sun et al. 2024: TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding
(arXiv 2404.11912).

Rule: the middle model M is the target over the selected tokens of `sparse_cache` and the newer ones. The small model
drafts `num_inner` tokens, and M verifies them and adds one of its own, until the chain has `min_tokens` tokens. The
target verifies the chain with q_i = M(. | text, x_<i). It is `hierarchical` with a middle model that needs no weights.
Guarantee: distribution. The selection does not change within a step, and every token i of the chain is drawn from
M(. | text, x_<i), for any lossless rule of the inner verification.
Motivation: with a long text a pass over the complete cache costs more than one over a part of it. So the complete cache
should be read once for many tokens, and the weights of the target should not be read for each of these.
Deviations: the selections and their refresh are those of `sparse_cache`. The small model reads the complete text; with
`draft_budget` it reads relevant chunks, as in `rapid`. The paper's reads the first tokens and the most recent ones.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.branching import narrow_or_wide
from specjax.catalog import Method, Option, shared
from specjax.drafters.layers import sparse_cache as sparse
from specjax.drafters.layers.early_exit import context_target
from specjax.drafters.layers.sparse_cache import SelectionSettings
from specjax.drafters.model.middle_chain import ChainRule, draft_chain, make_rule, skip_chain
from specjax.drafters.model.rapid import CHUNK_TOKENS, QUERY_TOKENS, rapid
from specjax.drafters.model.two_model import two_model
from specjax.engine.prepare import check_pair
from specjax.models.variants.cache_parts import growing_part
from specjax.numerics.validation import check_integer
from specjax.trees.contracts import verify_widths
from specjax.types import Array, Context, Drafter, Hooks, Model, Output, PyTree, Target, TokenTree, Traits, TreeSize

METHOD = Method(
    name="triforce",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with a smaller model for the target over a part of its cache, for long texts",
    paper="Sun et al. 2024, TriForce, arXiv 2404.11912",
    needs=frozenset({"draft"}),
    options=(
        Option("min_tokens", "int", 6, "drafted tokens after which the draft ends"),
        Option("num_inner", "int", 1, "tokens of the smaller model in each pass over a part of the cache"),
        Option("draft_budget", "int", None, "tokens of the prompt that the smaller model reads; default: all"),
        *shared.cached_selection("retrieval", 4096),
    ),
    factory="make_triforce",
    arguments=("target", "draft"),
)


class State(NamedTuple):
    """The small cache of the target and the state of the inner drafter."""

    selection: sparse.State
    draft: PyTree


def triforce(
    target: Target,
    inner: Drafter,
    *,
    min_tokens: int = 6,
    selection: str = "retrieval",
    budget: int = 4096,
    sinks: int = 4,
    window: int = 32,
    chunk: int = 8,
    refresh: int = 256,
    pays_from: int | None = None,
) -> Drafter:
    """Draft a chain of the target over `budget` tokens of its cache, which decodes with `inner`.

    Args:
      inner: the drafter of the target over a part of its cache, such as `two_model`. A `two_model` with `lag=3` needs
        no extra pass for tokens that its cache lacks.
      min_tokens: length of the chain at which drafting ends; 6 in the paper.
      selection, budget, sinks, window, chunk, refresh, pays_from: as in `sparse_cache`.

    State: that of `sparse_cache` and of the inner drafter. Raises: UsageError for a setting out of range, an inner
      drafter that cannot rewind, and a target without a cache of keys and values on one device.
    """
    settings = SelectionSettings(selection, budget, sinks, window, chunk, refresh, pays_from)
    sparse.check_selection(target.model, settings, "triforce")
    rule = make_rule(inner, min_tokens, "triforce")
    check_pair(target, inner)
    return _functions(target.model, rule, settings).replace(params=inner.params)


def make_triforce(
    target: Target, draft: Target, *, num_inner: int = 1, draft_budget: int | None = None, **options
) -> Drafter:
    """Return `triforce` with a draft model that reads the text, or its relevant chunks with a `draft_budget`.

    Raises: UsageError for a setting out of range.
    """
    check_integer("num_inner", num_inner)
    check_integer("draft_budget", draft_budget, CHUNK_TOKENS + QUERY_TOKENS)
    if draft_budget is None:
        return triforce(target, two_model(draft, num_inner, lag=3), **options)
    return triforce(target, rapid(draft, num_inner, budget=draft_budget), **options)


@functools.cache
def _functions(model: Model, rule: ChainRule, settings: SelectionSettings) -> Drafter:
    inner, count = rule.inner, rule.longest + 1

    def init(params, context: Context) -> State:
        selection = sparse.empty_state(model, settings, context, count + inner.num_nodes)
        return State(selection, inner.init(params, context))

    def read(params, state: State, context: Context, tokens: Array, num_new: Array, output: Output) -> State:
        assert inner.hooks.prefill is not None
        return state._replace(draft=inner.hooks.prefill(params, state.draft, context, tokens, num_new, output))

    def propose(params, keys, state: State, context: Context, limit: Array) -> tuple[TokenTree, State]:
        limit = jnp.where(context.length >= sparse.shortest_text(settings, context), limit, 0)
        state = state._replace(selection=sparse.follow(model, settings, count, state.selection, context, limit > 0))
        draft = functools.partial(_draft, model, rule, params, keys, context, limit)
        skip = functools.partial(_skip, model, rule, params, keys, context, jax.eval_shape(draft, state)[1])
        state, tree = narrow_or_wide(jnp.all(limit <= 0), skip, draft, state)
        return tree, state

    def export(params, state: State) -> PyTree:
        assert inner.hooks.export is not None
        return inner.hooks.export(params, state.draft)

    def axes(state: State) -> PyTree:
        return State(sparse.state_axes(model, state.selection), inner.hooks.axes(state.draft))

    return Drafter(
        propose=propose,
        size=TreeSize(count, rule.longest),
        init=init,
        traits=Traits(
            draws="chain",
            widths=verify_widths(range(1, count + 1)),
            taps=inner.traits.taps,
            lag=inner.traits.lag,
            rewinds=False,
        ),
        hooks=Hooks(
            prefill=None if inner.hooks.prefill is None else read,
            export=None if inner.hooks.export is None else export,
            axes=axes,
        ),
    )


def _middle(model: Model, context: Context) -> Target:
    return Target(sparse.without_windows(model), context_target(context).params)


def _draft(
    model: Model, rule: ChainRule, params, keys, context: Context, limit: Array, state: State
) -> tuple[State, TokenTree]:
    """Draft a chain. The small cache is written beyond its length, and keeps this length."""
    middle, small = _middle(model, context), state.selection.small
    inner, tree = draft_chain(rule, middle, params, keys, context, limit, small, state.draft)
    cache = middle.model.rewind_cache(inner.cache, growing_part(small).length)
    return State(state.selection._replace(small=cache), inner.draft), tree


def _skip(
    model: Model, rule: ChainRule, params, keys, context: Context, shapes: TokenTree, state: State
) -> tuple[State, TokenTree]:
    """Skip the draft and the passes over the small cache."""
    middle, small = _middle(model, context), state.selection.small
    draft, tree = skip_chain(rule, middle, params, keys, context, small, state.draft, shapes)
    return state._replace(draft=draft), tree
