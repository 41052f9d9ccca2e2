"""Sparse-cache self-drafting: the target drafts over a small part of its own cache, and verifies over all of it.

With a long text a plain pass mostly reads the cache. A draft pass reads the weights and `budget` cached tokens only.
The selections of tokens are those of
  sinks: Xiao et al. 2023, StreamingLLM (arXiv 2309.17453): the first tokens and the most recent ones;
  snapkv: Li et al. 2024, SnapKV (arXiv 2404.14469), as in Chen et al. 2024, MagicDec (arXiv 2408.11049): the tokens to
    which the last `window` tokens attend most, and these tokens, for each layer and key/value head;
  retrieval: Sun et al. 2024, TriForce (arXiv 2404.11912): the chunks whose mean key has the largest product with the
    newest query, the first chunk and the newest one, for each layer and key/value head.

  upper_half: Tiwari et al. 2025, QuantSpec (arXiv 2502.10424): all tokens of an int8 cache, by the upper four bits of
    each code. The target reads all eight bits of the same cache.

Rule: q(. | text) is the distribution of the target over the selected tokens and the newer ones. Keys keep the rotation
of their positions. After a step, the entries of accepted tokens are copied from the target's cache.
Guarantee: distribution (verified with the q that was sampled).
Deviations: SnapKV and TriForce select once, after the prompt. Here the tokens are selected again after `refresh` new
ones, so the memory does not grow with the output. SnapKV's sum of attention is smoothed by a mean over five tokens; the
papers take a mean or a maximum. TriForce's retrieval takes the sum over the query heads of a key/value head.
QuantSpec chooses new codes of four bits, with groups and a buffer in full precision. Here the upper half of the code
that the cache has anyway is read, so nothing else is stored. A program still moves the bytes of the int8 cache: fewer
would need a second, packed copy of these halves. The weights of the draft are those of the target.
Layers with a window of attention keep the most recent tokens. A draft does not apply the window, because a slot of the
small cache is not a position. So it sees the same tokens while `budget` and the newer tokens fit into the window.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.arrays import batch_axes
from specjax.arrays.branching import update_if
from specjax.catalog import Method, shared
from specjax.costs.drafting import long_context
from specjax.drafters.layers.early_exit import context_target, self_draft
from specjax.errors import UsageError
from specjax.models import make_model
from specjax.models.decoder import UNLIMITED_WINDOW
from specjax.models.variants import cache_parts
from specjax.numerics.validation import check_integer
from specjax.retrieval import cached_tokens
from specjax.retrieval.last_queries import check_keys, last_queries
from specjax.trees import Builder
from specjax.types import Array, Context, Drafter, Hooks, Model, PyTree, Target, Traits, TreeSize

METHOD = Method(
    name="sparse_cache",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with the target over a small part of its own cache, for long texts",
    paper="Chen et al. 2024, MagicDec, arXiv 2408.11049",
    options=(
        shared.num_tokens(3),
        shared.TREE,
        shared.STOP,
        *shared.cached_selection("snapkv", 256, "upper_half"),
    ),
    draft_cost=1.0,
    arguments=("target",),
)

SELECTIONS = ("sinks", "snapkv", "retrieval")
UPPER_HALF = "upper_half"
"""The selection of all tokens of an int8 cache in four bits."""


class SelectionSettings(NamedTuple):
    """SelectionSettings of the selection, as in `sparse_cache`."""

    selection: str
    budget: int
    sinks: int
    window: int
    chunk: int
    refresh: int
    pays_from: int | None


class State(NamedTuple):
    """The small cache of each row."""

    small: PyTree  # a `KVCache`: selected tokens in the order of the text, then newer ones
    read: Array  # int32[B], tokens of the text that it was made from; 0: it is empty


def sparse_cache(
    target: Target,
    *,
    num_tokens: int = 3,
    tree: Builder | None = None,
    stop: trees.Stop | None = None,
    selection: str = "snapkv",
    budget: int = 256,
    sinks: int = 4,
    window: int = 32,
    chunk: int = 8,
    refresh: int = 256,
    pays_from: int | None = None,
) -> Drafter:
    """Draft a chain of `num_tokens` tokens, or a `tree`, with the target over `budget` tokens of its cache.

    Args:
      stop: the condition that ends a row's draft, such as `trees.stops.confidence(0.6)`.
      selection: "sinks", "snapkv", "retrieval" or, for an int8 cache, "upper_half". This one has no `budget`.
      budget: selected tokens. A draft also reads up to `refresh` newer tokens.
      pays_from: length of the text from which a row drafts. Shorter rows decode plainly. None: the length at which the
        cache of all rows has a quarter of the bytes of the weights, and at least twice the budget.

    State: a cache of budget + refresh tokens per row. Raises: UsageError for a setting out of range, and for a target
      without a cache of keys and values on one device.
    """
    settings = SelectionSettings(selection, budget, sinks, window, chunk, refresh, pays_from)
    builder = trees.make_builder(num_tokens, tree, stop)
    check_selection(target.model, settings, "sparse_cache", (*SELECTIONS, UPPER_HALF))
    if selection == UPPER_HALF:
        if target.model.config.cache_dtype != "int8":
            raise UsageError(
                f"selection upper_half reads an int8 cache, and that of {target.model.name} is "
                f"{target.model.config.cache_dtype or target.model.config.dtype}; use cache_dtype int8 (--cache-dtype)"
            )
        return _upper_half_functions(builder, settings)
    return _functions(target.model, builder, settings)


def check_selection(
    model: Model, settings: SelectionSettings, user: str, selections: tuple[str, ...] = SELECTIONS
) -> None:  # fmt: skip
    """Check the settings of a selection. Raises: UsageError for a wrong one, or a model that does not fit."""
    check_keys(model, user, "choose a method such as auto")
    if settings.selection not in selections:
        raise UsageError(f'selection must be one of {", ".join(selections)}, not "{settings.selection}"')
    for name in ("sinks", "window", "chunk", "refresh"):
        check_integer(name, getattr(settings, name))
    check_integer("budget", settings.budget, _smallest_budget(settings))
    if settings.pays_from is not None:
        check_integer("pays_from", settings.pays_from, 0)


def _smallest_budget(settings: SelectionSettings) -> int:
    """Return the tokens that a selection always keeps, and one more."""
    always = {"sinks": settings.sinks, "snapkv": settings.window, "retrieval": 2 * settings.chunk, UPPER_HALF: 0}
    return always[settings.selection] + 1


@functools.cache
def _functions(model: Model, builder: Builder, settings: SelectionSettings) -> Drafter:
    drafting = without_windows(model)

    def init(params, context: Context) -> State:
        return empty_state(model, settings, context, 2 * builder.num_nodes)

    def propose(params, keys, state: State, context: Context, limit: Array):
        limit = jnp.where(context.length >= shortest_text(settings, context), limit, 0)
        state = follow(model, settings, builder.max_depth + 1, state, context, limit > 0)
        draft = Target(drafting, context_target(context).params)
        tree = self_draft(builder, keys, context._replace(cache=state.small, target=draft), limit, None)
        return tree, state

    def resume(params, state: State, length: Array) -> State:
        is_valid, text = length > state.read, cache_parts.growing_part(state.small)
        text = text._replace(length=jnp.where(is_valid, text.length, 0))
        return State(cache_parts.with_growing_part(state.small, text), jnp.where(is_valid, state.read, 0))

    return Drafter(
        propose=propose,
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=init,
        traits=Traits(draws=builder.draws, widths=builder.widths, rewinds=False),
        hooks=Hooks(resume=resume, axes=functools.partial(state_axes, model)),
    )


@functools.cache
def _upper_half_functions(builder: Builder, settings: SelectionSettings) -> Drafter:
    def propose(params, keys, state, context: Context, limit: Array):
        limit = jnp.where(context.length >= shortest_text(settings, context), limit, 0)
        half = context._replace(cache=cache_parts.upper_half(context.cache))
        return self_draft(builder, keys, half, limit, None), state

    return Drafter(
        propose=propose,
        size=TreeSize(builder.num_nodes, builder.max_depth),
        traits=Traits(draws=builder.draws, widths=builder.widths, follows_any_tree=True),
    )


def empty_state(model: Model, settings: SelectionSettings, context: Context, room: int) -> State:
    """Return the state before a selection, with slots for the selection, the newer tokens and `room` more."""
    batch = len(context.length)
    small = model.init_cache(context_target(context).params, None, batch, settings.budget + settings.refresh + room)
    return State(small, jnp.zeros((batch,), jnp.int32))


def without_windows(model: Model) -> Model:
    """Return the model whose layers attend to all slots of the cache, with the rotations of each kind of layer."""
    if model.config.window is None:
        return model
    return make_model(dataclasses.replace(model.config, window=UNLIMITED_WINDOW))


def state_axes(model: Model, state: State) -> PyTree:
    rows_first: Any = 0
    return State(model.axes(state.small), rows_first)


def shortest_text(settings: SelectionSettings, context: Context) -> int:
    """Return the length of the text from which a row drafts."""
    if settings.pays_from is not None:
        return settings.pays_from
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    cache = cache_parts.growing_part(context.cache)
    per_token = size((cache.k, cache.v)) / cache_parts.num_slots(cache)  # of all rows
    return max(2 * settings.budget, long_context(size(context_target(context).pass_params), per_token))


def follow(
    model: Model, settings: SelectionSettings, count: int, state: State, context: Context, drafting: Array
) -> State:  # fmt: skip
    """Bring the small caches of rows that draft, bool[B], up to the text.

    count: the most tokens that a step adds to the text.
    """
    cached = context.length - 1  # tokens in the target's cache
    is_new = state.read == 0
    is_full = cache_parts.growing_part(state.small).length + cached - state.read > settings.budget + settings.refresh
    # A row that did not draft for a while has missed more tokens than are copied at once.
    is_behind = cached - state.read > count
    again = drafting & (is_new | is_full | is_behind) & (cached > 0)
    reselect = lambda length, state: _select(model, settings, state, context._replace(length=length), again)
    state = update_if(jnp.any(again), reselect, context.length, state)
    newer = jnp.where(drafting, cached - state.read, 0)
    pending = cache_parts.read_entries(context.cache, state.read, count)
    path = jnp.broadcast_to(jnp.arange(count), (len(cached), count))
    return State(model.commit(state.small, pending, path, newer), state.read + newer)


def _select(model: Model, settings: SelectionSettings, state: State, context: Context, rows: Array) -> State:
    """Select tokens anew for `rows` bool[B]."""
    cached, cache, small = context.length - 1, context.cache, state.small
    slots = _select_slots(model, settings, context, cached)
    length = jnp.sum(slots[0, :, 0] < cached[:, None], -1)
    selected = State(cache_parts.gather_slots(small, cache, slots, length), cached)
    return batch_axes.where_rows(rows, selected, state, state_axes(model, state))


def _select_slots(model: Model, settings: SelectionSettings, context: Context, cached: Array) -> Array:
    """Return the selected slots of each layer and key/value head, int32[layers, B, K or 1, budget]."""
    cache, layers, config = context.cache, model.capabilities.num_layers, model.config
    if config.window is not None:
        size = cache_parts.num_slots(cache)
        is_global = np.array(config.is_global or (False,) * layers)[:, None, None, None]
        if not is_global.any():
            recent = cached_tokens.ends_of_text(cached, size, settings.budget, 0)
            return jnp.broadcast_to(recent[None, :, None], (layers, len(cached), 1, settings.budget))
        full = _select_from_all(model, settings, context, cached)
        # All layers have one length, and chunks may be fewer tokens than the budget.
        count = jnp.sum(full[0, :, 0] < cached[:, None], -1, keepdims=True)
        place = jnp.arange(settings.budget)
        recent = jnp.where(place < count, cached[:, None] - count + place, size)
        return jnp.broadcast_to(jnp.where(is_global, full, recent[:, None]), (layers, *full.shape[1:]))
    return _select_from_all(model, settings, context, cached)


def _select_from_all(model: Model, settings: SelectionSettings, context: Context, cached: Array) -> Array:
    """Return the slots that layers without a window select, int32[layers, B, K or 1, budget]."""
    cache, layers = context.cache, model.capabilities.num_layers
    if settings.selection == "sinks":
        slots = cached_tokens.ends_of_text(cached, cache_parts.num_slots(cache), settings.budget, settings.sinks)
        return jnp.broadcast_to(slots[None, :, None], (layers, len(cached), 1, settings.budget))
    count = settings.window if settings.selection == "snapkv" else 1
    queries, positions = last_queries(context_target(context), context.tokens, cache, cached, count)

    def of_layer(query: Array, key: Array) -> Array:
        if settings.selection == "snapkv":
            return cached_tokens.most_attended(query, positions, key, cached, settings.budget)
        return cached_tokens.nearest_chunks(query[:, 0], key, cached, settings.budget, settings.chunk)

    return cache_parts.map_keys(of_layer, queries, cache)
