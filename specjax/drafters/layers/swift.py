"""SWIFT: the target drafts for itself with sublayers skipped, and finds out while decoding which ones.

Xia et al.: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (ICLR 2025), arXiv 2410.06916.

Rule: K = floor(ratio * C) of the C attention and MLP sublayers between the first and the last layer are skipped. As
soon as more than w tokens are there, each round scores one other set: the share of the first w tokens x_t for which the
model without it, all of them in one pass behind the prompt's cache, finds argmax = x_{t+1}. A better set replaces the
best one. The search ends at a score above `enough`, after `patience` failures in a row or after `max_trials` sets.
A draft ends behind the first token that is drawn where none has probability `stop`.
Guarantee: distribution (verified with the q that was sampled).

Per row: the set is the row's own, chosen by its own text, so a row does not depend on its batch. A sublayer runs if any
row needs it: one row gets the full gain, a batch skips what all of its rows skip. So that rows of one kind of text
choose alike, they score the same sequence of random sets.

Deviations: drafts read the target's own cache, not a copy. The first set is scored as well (the authors replace it by
the first proposal in any case). Proposals are, in turn, the best set with one sublayer exchanged and a random set; the
Bayesian proposal of every 25th step is left out. The confidence that ends a draft is that of temperature 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.arrays.indexing import first_largest, take_along
from specjax.catalog import Method, Option, shared
from specjax.drafters.layers.early_exit import layers_of, self_draft, target_of
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.trees import Builder
from specjax.trees.contracts import Stop
from specjax.trees.stops import top_unwarped
from specjax.types import Array, Context, Drafter, Sublayers, Target, Traits, TreeSize

METHOD = Method(
    name="swift",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with the target while skipping sublayers, and optimises the skipped set during decoding",
    paper="Xia et al. 2024, arXiv 2410.06916",
    options=(
        shared.num_tokens(25),
        shared.TREE,
        Option("ratio", "float", 0.45, "fraction of sublayers to skip"),
        Option("layers", "integers", None, "layers that may be skipped; default: all but the first and last"),
        Option("stop", "float", 0.8, "the draft ends after a token with a lower probability"),
        Option("window", "int", 32, "tokens that score a set of sublayers"),
        Option("enough", "float", 0.95, "score at which the search ends"),
        Option("patience", "int", 300, "steps without improvement after which the search ends"),
        Option("max_trials", "int", 1000, "maximum number of search steps"),
    ),
    draft_cost=0.55,
    arguments=("target",),
)


class SkipSet(NamedTuple):
    """The search, per row. Sets are bool[B, C]: attention of the layers that may be skipped, then their MLPs."""

    skipped: Array  # bool[B, C], the best so far
    hits: Array  # int32[B], its score times w; -1: not scored
    trials: Array  # int32[B], sets scored
    failures: Array  # int32[B], since the last better one
    start: Array  # int32[B], length of the prompt


def swift(
    target: Target,
    num_tokens: int = 25,
    *,
    tree: Builder | None = None,
    ratio: float = 0.45,
    layers: tuple[int, ...] | None = None,
    stop: float = 0.8,
    window: int = 32,
    enough: float = 0.95,
    patience: int = 300,
    max_trials: int = 1000,
) -> Drafter:
    """A chain of at most `num_tokens` tokens, or a `tree` (the authors': `trees.chain_with_siblings`).

    Args:
      ratio: share of sublayers to skip. layers: those that may be skipped in part; default: all but the first and last.
      stop: a draft ends behind a token that is less sure than this; 0: never. A `tree` with a stop rule keeps its own.
      window: tokens that a set is scored on. enough, patience, max_trials: when the search ends. Each round of the
        search costs a pass of the model, without the set, over `window` tokens; `max_trials=0` keeps the first set.

    State: SkipSet. Raises: UsageError for a setting outside its range, or a model with nothing to skip.
    """
    most = layers_of(target)
    layers = tuple(range(1, most - 1)) if layers is None else tuple(sorted(set(layers)))
    if not layers:
        raise UsageError(f"a model of {most} layers has none between the first and the last; name some with layers=")
    if not 0 <= layers[0] <= layers[-1] < most:
        raise UsageError(f"layers must be from 0 to {most - 1}, not {layers}")
    if not 0 <= ratio < 1:
        raise UsageError(f"ratio must be at least 0 and below 1, not {ratio}")
    counts = {"num_tokens": num_tokens, "window": window, "patience": patience, "max_trials": max_trials}
    for name, value in counts.items():
        least = 0 if name == "max_trials" else 1
        if value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    if not 0 <= enough <= 1:
        raise UsageError(f"enough is a share of the window, from 0 to 1, not {enough}")
    if not stop >= 0:
        raise UsageError(f"stop must be at least 0, not {stop}; 0 never stops")
    if target.model.rewind is None and max_trials:
        raise UsageError(
            f"the model {target.model.name} cannot rewind its cache, in which sets are scored; use max_trials=0"
        )
    search = _Search(most, layers, ratio, window, enough, patience, max_trials)
    return _functions(search, tree or trees.chain(num_tokens), stop)


class _Search(NamedTuple):
    num_layers: int
    layers: tuple[int, ...]
    ratio: float
    window: int
    enough: float
    patience: int
    max_trials: int

    @property
    def size(self) -> int:
        """K, the number of sublayers to skip."""
        return math.floor(self.ratio * 2 * len(self.layers) + 1e-9)

    def first(self) -> np.ndarray:
        """bool[C]: every second layer, filled up or cut to K sublayers."""
        n = len(self.layers)
        order = [part * n + i for i in (*range(0, n, 2), *range(1, n, 2)) for part in (0, 1)]
        return np.isin(np.arange(2 * n), order[: self.size])

    def sublayers(self, skipped: Array) -> Sublayers:
        """Those that run."""
        n, places = len(self.layers), jnp.array(self.layers)
        every = jnp.ones((skipped.shape[0], self.num_layers), bool)
        return Sublayers(every.at[:, places].set(~skipped[:, :n]), every.at[:, places].set(~skipped[:, n:]))


@functools.cache
def _functions(search: _Search, builder: Builder, stop: float) -> Drafter:
    if stop and builder.stop is None:
        builder = dataclasses.replace(builder, stop=Stop(lambda value, fed: (value, top_unwarped(fed) >= stop)))
    return Drafter(
        propose=functools.partial(_propose, search, builder),
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=functools.partial(_init, search),
        traits=Traits(draws=builder.draws, widths=builder.widths),
    )


def _init(search: _Search, params, context: Context) -> SkipSet:
    batch = context.length.shape[0]
    zeros = jnp.zeros((batch,), jnp.int32)
    first = jnp.broadcast_to(jnp.asarray(search.first()), (batch, 2 * len(search.layers)))
    return SkipSet(first, zeros - 1, zeros, zeros, context.length)


def _propose(search: _Search, builder: Builder, params, keys, state: SkipSet, context: Context, limit: Array):
    if search.size > 0 and search.max_trials > 0:
        state = search_once(search, state, context, limit)
    return self_draft(builder, keys, context, limit, search.sublayers(state.skipped)), state


def search_once(search: _Search, state: SkipSet, context: Context, limit: Array) -> SkipSet:
    """Score one more set for each row that drafts and still searches; nothing runs if none does."""
    done = (state.hits > search.enough * search.window) | (state.failures >= search.patience)
    searching = ~done & (state.trials < search.max_trials) & (context.length > state.start + search.window)
    searching &= limit > 0
    tried = jnp.where((state.trials == 0)[:, None], state.skipped, _proposal(state, search.size))
    zeros = jnp.zeros_like(state.hits)
    hits = jax.lax.cond(
        jnp.any(searching),
        lambda: matchness(search, tried, searching, state.start, context),
        lambda: zeros,
    )
    better = searching & (hits > state.hits)
    return SkipSet(
        jnp.where(better[:, None], tried, state.skipped),
        jnp.where(better, hits, state.hits),
        state.trials + searching,
        jnp.where(better, 0, state.failures + searching),
        state.start,
    )


def matchness(search: _Search, skipped: Array, rows: Array, start: Array, context: Context) -> Array:
    """int32[B]: how many of the tokens start + 1 ... start + w the model without `skipped` bool[B, C] names first.

    Runs for `rows` bool[B] only. The tokens read the cache of the prompt, of `start` int32[B] tokens, and each other.
    """
    batch, w = skipped.shape[0], search.window
    places = start[:, None] + jnp.arange(w + 1)
    text = take_along(context.tokens, jnp.minimum(places, context.tokens.shape[1] - 1), 1)
    model, params = target_of(context).model, target_of(context).params
    output, _ = model.forward(
        params, text[:, :-1], model.rewind_cache(context.cache, start), positions=places[:, :-1],
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((w, w), bool)), (batch, w, w)),
        layers=jax.tree.map(lambda runs: runs & rows[:, None], search.sublayers(skipped)),
    )  # fmt: skip
    return jnp.sum(first_largest(output.logits) == text[:, 1:], 1, dtype=jnp.int32)


def _proposal(state: SkipSet, size: int) -> Array:
    """bool[B, C]: a random set, or in every second trial the best one with one sublayer exchanged."""
    noise = sampling.uniform(sampling.fold_in(sampling.threefry(0), state.trials), state.skipped.shape[1])
    index = jnp.arange(noise.shape[1])
    leaves = jnp.argmax(jnp.where(state.skipped, noise, -1.0), 1, keepdims=True) == index
    enters = jnp.argmax(jnp.where(state.skipped, -1.0, noise), 1, keepdims=True) == index
    exchanged = (state.skipped & ~leaves) | enters
    order = jnp.argsort(jnp.argsort(noise, 1), 1)  # a few dozen sublayers, no vocabulary
    return jnp.where((state.trials % 2 == 1)[:, None], exchanged, order < size)
