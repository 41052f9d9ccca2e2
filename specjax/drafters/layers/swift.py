"""SWIFT: the target drafts with skipped sublayers, and a search during decoding optimises the skipped set.

Xia et al.: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (ICLR 2025), arXiv 2410.06916.

Rule: K = floor(ratio * C) of the C attention and MLP sublayers between the first and the last layer are skipped. Once a
row has more than w new tokens, each step scores one other set. The score is the fraction of the first w tokens x_t for
which the model without the set predicts argmax = x_{t+1}; one pass over the prompt's cache computes it. A better set
replaces the best one. The search ends at a score above `enough`, after `patience` failures in a row, or after
`max_trials` sets. A draft ends after the first token from a distribution without a token of probability `stop` or more.
Guarantee: distribution (verified with the q that was sampled).

Each row has its own set, chosen by its own text, so a row does not depend on its batch. A sublayer runs if any row
needs it: a single row gets the full gain, and a batch skips the sublayers that all rows skip. All rows score the same
sequence of random sets, so that rows of similar texts make similar choices.

Deviations: drafts read the target's own cache, not a copy. The first set is scored too; the authors replace it by the
first proposal in any case. Proposals alternate between the best set with one sublayer exchanged and a random set. The
Bayesian proposal of every 25th step is missing. The confidence that ends a draft is that of temperature 1.
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
from specjax.drafters.layers.early_exit import context_target, self_draft
from specjax.errors import UsageError
from specjax.models.requirements import check_partial_passes, check_rewinds
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
    """State of the search per row. A set bool[B, C] lists the attentions of the skippable layers, then their MLPs."""

    skipped: Array  # bool[B, C], the best set so far
    hits: Array  # int32[B], its score times w; -1: not scored
    trials: Array  # int32[B], number of scored sets
    failures: Array  # int32[B], trials since the last improvement
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
    """Draft a chain of at most `num_tokens` tokens, or a `tree` (the authors use `trees.chain_with_siblings`).

    Args:
      ratio: fraction of sublayers to skip.
      layers: layers with sublayers that may be skipped; default: all but the first and last.
      stop: a draft ends after a token with a lower probability; 0: never. A `tree` with a stop condition keeps its own.
      window: number of tokens that score a set.
      enough, patience, max_trials: limits of the search. Each step of the search costs a pass of the model, without the
        set, over `window` tokens. `max_trials=0` keeps the first set.

    State: SkipSet. Raises: UsageError for a setting out of range, or a model without layers to skip.
    """
    num_layers = check_partial_passes(target.model, "swift")
    layers = tuple(range(1, num_layers - 1)) if layers is None else tuple(sorted(set(layers)))
    if not layers:
        raise UsageError(
            f"a model of {num_layers} layers has none between the first and the last; choose layers with layers="
        )
    if not 0 <= layers[0] <= layers[-1] < num_layers:
        raise UsageError(f"layers must be from 0 to {num_layers - 1}, not {layers}")
    if not 0 <= ratio < 1:
        raise UsageError(f"ratio must be at least 0 and below 1, not {ratio}")
    counts = {"num_tokens": num_tokens, "window": window, "patience": patience, "max_trials": max_trials}
    for name, value in counts.items():
        minimum = 0 if name == "max_trials" else 1
        if value < minimum:
            raise UsageError(f"{name} must be at least {minimum}, not {value}")
    if not 0 <= enough <= 1:
        raise UsageError(f"enough is a fraction of the window, from 0 to 1, not {enough}")
    if not stop >= 0:
        raise UsageError(f"stop must be at least 0, not {stop}; 0 never stops")
    if max_trials:
        check_rewinds(target.model, "the search of swift", "use max_trials=0")
    search = SkipSearch(num_layers, layers, ratio, window, enough, patience, max_trials)
    return _functions(search, tree or trees.chain(num_tokens), stop)


class SkipSearch(NamedTuple):
    num_layers: int
    layers: tuple[int, ...]
    ratio: float
    window: int
    enough: float
    patience: int
    max_trials: int

    @property
    def size(self) -> int:
        """Return K, the number of sublayers to skip."""
        return math.floor(self.ratio * 2 * len(self.layers) + 1e-9)

    def first(self) -> np.ndarray:
        """Return the first set bool[C]: every second layer, filled up or cut to K sublayers."""
        n = len(self.layers)
        order = [part * n + i for i in (*range(0, n, 2), *range(1, n, 2)) for part in (0, 1)]
        return np.isin(np.arange(2 * n), order[: self.size])

    def sublayers(self, skipped: Array) -> Sublayers:
        """Return the sublayers that run if `skipped` bool[B, C] does not."""
        n, places = len(self.layers), jnp.array(self.layers)
        every = jnp.ones((skipped.shape[0], self.num_layers), bool)
        return Sublayers(every.at[:, places].set(~skipped[:, :n]), every.at[:, places].set(~skipped[:, n:]))


@functools.cache
def _functions(search: SkipSearch, builder: Builder, stop: float) -> Drafter:
    if stop and builder.stop is None:
        builder = dataclasses.replace(builder, stop=Stop(lambda value, fed: (value, top_unwarped(fed) >= stop)))
    return Drafter(
        propose=functools.partial(_propose, search, builder),
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=functools.partial(_init, search),
        traits=Traits(draws=builder.draws, widths=builder.widths),
    )


def _init(search: SkipSearch, params, context: Context) -> SkipSet:
    batch = context.length.shape[0]
    zeros = jnp.zeros((batch,), jnp.int32)
    first = jnp.broadcast_to(jnp.asarray(search.first()), (batch, 2 * len(search.layers)))
    return SkipSet(first, zeros - 1, zeros, zeros, context.length)


def _propose(search: SkipSearch, builder: Builder, params, keys, state: SkipSet, context: Context, limit: Array):
    if search.size > 0 and search.max_trials > 0:
        state = search_once(search, state, context, limit)
    return self_draft(builder, keys, context, limit, search.sublayers(state.skipped)), state


def search_once(search: SkipSearch, state: SkipSet, context: Context, limit: Array) -> SkipSet:
    """Score one more set for each row that drafts and still searches; the model does not run if no row does."""
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


def matchness(search: SkipSearch, skipped: Array, rows: Array, start: Array, context: Context) -> Array:
    """Return int32[B], the number of tokens start + 1 ... start + w that the model without `skipped` predicts first.

    Args:
      skipped: bool[B, C]. rows: bool[B], rows for which the model runs. start: int32[B], length of the prompt. The
        tokens read the cache of the prompt.
    """
    batch, w = skipped.shape[0], search.window
    places = start[:, None] + jnp.arange(w + 1)
    text = take_along(context.tokens, jnp.minimum(places, context.tokens.shape[1] - 1), 1)
    model, params = context_target(context).model, context_target(context).params
    output, _ = model.forward(
        params, text[:, :-1], model.rewind_cache(context.cache, start), positions=places[:, :-1],
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((w, w), bool)), (batch, w, w)),
        layers=jax.tree.map(lambda runs: runs & rows[:, None], search.sublayers(skipped)),
    )  # fmt: skip
    return jnp.sum(first_largest(output.logits) == text[:, 1:], 1, dtype=jnp.int32)


def _proposal(state: SkipSet, size: int) -> Array:
    """Return the next set bool[B, C]: a random one, or in every second trial the best one with one exchange."""
    noise = sampling.uniform(sampling.fold_in(sampling.threefry(0), state.trials), state.skipped.shape[1])
    index = jnp.arange(noise.shape[1])
    leaves = jnp.argmax(jnp.where(state.skipped, noise, -1.0), 1, keepdims=True) == index
    enters = jnp.argmax(jnp.where(state.skipped, -1.0, noise), 1, keepdims=True) == index
    exchanged = (state.skipped & ~leaves) | enters
    order = jnp.argsort(jnp.argsort(noise, 1), 1)  # over a few dozen sublayers, not a vocabulary
    return jnp.where((state.trials % 2 == 1)[:, None], exchanged, order < size)
