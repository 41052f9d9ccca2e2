"""A model whose cache keeps a part of the prompt, as an ordinary `Model`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.compression.draft_tokens import look_ahead
from specjax.engine.prefill import prefill
from specjax.models.variants import cache_parts
from specjax.retrieval import cached_tokens
from specjax.retrieval.last_queries import read_last
from specjax.types import Array, Model, PyTree, Target


class CacheRule(NamedTuple):
    """The settings of `speckv`. All are static in its program."""

    capacity: int
    window: int
    kernel: int
    lookahead: int
    max_new_tokens: int


class CompactCache(NamedTuple):
    """The cache of the base model, which has all tokens while the prompt is read, and a part of them afterwards."""

    base: PyTree  # a `KVCache`
    dropped: Array  # int32[B], tokens of the prompt that are not in the cache


@functools.cache
def compact_model(base: Model, draft: Model | None, rule: CacheRule) -> Model:
    """Return `base` with a cache of at most `rule.capacity` tokens of the prompt.

    The parameters are {"base": those of `base`}, and "draft": those of the model that looks ahead, if it is another.
    """

    def init_cache(params, inputs, batch: int, capacity: int) -> CompactCache:
        return CompactCache(base.init_cache(params["base"], inputs, batch, capacity), jnp.zeros((batch,), jnp.int32))

    def forward(params, tokens, cache: CompactCache, **options: Any):
        return base.forward(params["base"], tokens, cache.base, **options)

    def commit(cache: CompactCache, pending: PyTree, path: Array, num_nodes: Array) -> CompactCache:
        return cache._replace(base=base.commit(cache.base, pending, path, num_nodes))

    def rewind(cache: CompactCache, length: Array) -> CompactCache:
        return cache._replace(base=base.rewind_cache(cache.base, length - cache.dropped))

    def finish_prompt(params, cache: CompactCache, tokens: Array, length: Array, num_nodes: int) -> CompactCache:
        target, full, cached = Target(base, params["base"]), cache.base, length - 1
        if draft is None:
            text, full = look_ahead(target, tokens, full, length, rule.lookahead)
            full = base.rewind_cache(full, cached)
        else:
            text = _text_of_draft(Target(draft, params["draft"]), tokens, length, rule.lookahead)
        slots = select_slots(target, text, full, cached, rule)
        room = rule.capacity + rule.max_new_tokens + num_nodes + 1
        small = base.init_cache(target.params, None, len(length), room)
        remaining = jnp.minimum(cached, rule.capacity)
        return CompactCache(cache_parts.gather_slots(small, full, slots, remaining), cached - remaining)

    def axes(arrays: CompactCache | PyTree) -> PyTree:
        if not isinstance(arrays, CompactCache):
            return base.axes(arrays)
        return batch_axes.rows_first(arrays)._replace(base=base.axes(arrays.base))

    # The digest of a run contains the name, so that no checkpoint continues with other settings.
    settings = f"window={rule.window},kernel={rule.kernel},lookahead={rule.lookahead}"
    of_base = lambda function: function and (lambda params, *arguments: function(params["base"], *arguments))
    return base._replace(
        init_cache=init_cache,
        forward=forward,
        commit=commit,
        rewind=rewind,
        finish_prompt=finish_prompt,
        axes=axes,
        embed=of_base(base.embed),
        unembed=of_base(base.unembed),
        head=of_base(base.head),
        best=of_base(base.best),
        queries=None,  # a slot of the cache is no position
        pass_params=lambda params: params["base"],
        config=None,
        base_config=base.config or base.base_config,
        name=f"{base.name} by speckv:{rule.capacity},{settings}",
        max_positions=min(base.max_positions, base.max_positions if draft is None else draft.max_positions),
        capabilities=base.capabilities._replace(depth=False, new_tokens=rule.max_new_tokens),
    )


def _text_of_draft(draft: Target, tokens: Array, length: Array, count: int) -> Array:
    """Return prompts int32[B, L] with `count` tokens of a draft model after them."""
    cache = draft.model.start_cache(draft.params, None, length, tokens.shape[1])
    cache = prefill(draft.model, draft.params, cache, tokens, length - 1)
    return look_ahead(draft, tokens, cache, length, count)[0]


def select_slots(target: Target, text: Array, cache: PyTree, cached: Array, rule: CacheRule) -> Array:
    """Return the slots that stay of each layer and key/value head, int32[layers, B, K, capacity].

    Args:
      text: int32[B, L], the prompt and the lookahead after it. cache: the prompt's first `cached` int32[B] tokens, all
        but the last one.
    """
    count = rule.window + 1 + rule.lookahead
    last = read_last(target, text, cache, cached + 1 + rule.lookahead, count)
    start = last.positions[:, 0]

    def of_layer(query: Array, key: Array, new_key: Array) -> Array:
        return cached_tokens.most_observed(query, key, new_key, start, cached, rule.capacity, rule.kernel)

    return cache_parts.map_keys(of_layer, last.queries, cache, last.pending)
