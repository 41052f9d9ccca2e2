"""ADED: a table of tri-grams that adapts to the text, and a tree drafted from it by best-first or Monte Carlo search.

Liu, Lei et al.: Adaptive Draft-Verification for Efficient Large Language Model Decoding (2024), arXiv 2407.12021.

Rule: a score P(c | a, b) of the tri-gram abc: its share in a corpus among those that begin with ab, 12 at most per
pair; before each draft every tri-gram of the last 16 tokens gets P <- min(P + 0.04, 3). The tree hangs off the last two
tokens.
  best_first: the paths with the largest product of P, normalised per pair.
  mcts: `iterations` times, go down from the root to the child with the largest
    s / n + P sqrt(N) / (1 + n) (32 + ln((N + 9) / 8)) (an unvisited one first; N visits of the parent, n of the child,
    s their rewards), give the leaf all its successors as children and step to the last, complete the path to `depth`
    tokens by drawing successors from P, and add its reward to the path. The tree is the most visited paths, each with
    its likeliest next token.
Guarantee: distribution. The search reads the past and the draft's own keys, never the noise of the target's draws, so
its tree is a point mass to the verifier.
Deviations: best-first search by default: it is the limit of mcts in which P decides alone, and runs level by level
instead of 150 iterations one after another (the authors' number; here 32). The reward is (1 + sum of min(P, 1) along
the path) / (depth + 1); the authors' code means to sum P but looks up the wrong token, so its reward hardly varies
(`reward="constant"`). One table per row, empty at first and taught by the prompt too, each occurrence one bonus; a
corpus, if given, lies beside it and is not changed, and the scores of both are added. An unknown pair drafts nothing
(the authors guess a token).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.catalog import Method, Option, shared
from specjax.errors import UsageError
from specjax.retrieval import ngrams
from specjax.retrieval.datastore import Datastore
from specjax.trees.operations import compact
from specjax.trees.table_search import Reward, best_first, monte_carlo
from specjax.types import Array, Context, Drafter, Hooks, PyTree, TokenTree, Traits, TreeSize

METHOD = Method(
    name="aded",
    kind="drafter",
    guarantee="distribution",
    summary="searches a tree in a table of trigrams that adapts to the text",
    paper="Liu et al. 2024, arXiv 2407.12021",
    takes=frozenset({"datastore"}),
    options=(
        shared.num_nodes(63),
        Option("depth", "int", 4, "maximum depth of the tree"),
        Option("search", ("best_first", "mcts"), "best_first", "search algorithm"),
        Option("iterations", "int", 32, "iterations of mcts"),
        Option("reward", ("mean", "sum", "constant"), "mean", "reward of mcts"),
        shared.buckets(4096),
    ),
    cpu_options={"num_nodes": 7},
    factory="make_aded",
)


WAYS = 12  # successors of a pair
RECENT, BONUS, CAP = 16, 0.04, 3.0  # the adaptation
MOST_VISITED = 24  # paths that the search keeps


class AdedState(NamedTuple):
    """Tri-grams of the row's own text."""

    table: ngrams.Table  # of tri-grams by their first two tokens; values float32: the bonuses so far
    length: Array  # int32[B], of the text when it was last taught


@functools.cache
def aded(
    *,
    num_nodes: int = 63,
    depth: int = 4,
    search: Literal["best_first", "mcts"] = "best_first",
    iterations: int = 32,
    reward: Reward = "mean",
    buckets: int = 4096,
) -> Drafter:
    """A tree of up to `num_nodes` drafted tokens, at most `depth` deep, searched in a table of tri-grams.

    Args:
      search: how. With "mcts" the tree has the num_nodes / 2 (at most 24) most visited paths of up to depth - 1 tokens,
        and one more token after each. iterations, reward: of mcts. buckets: of the table, per row.

    Params: () or the tri-grams of a corpus, `aded().replace(params=corpus_table(texts))`; `DecodeResult.drafter` has
    in them what all rows were taught, scores added.
    State: AdedState; the table takes 240 x buckets bytes per row (1 MB by default).
    Raises: UsageError for a setting outside its range.
    """
    if search not in ("best_first", "mcts"):
        raise UsageError(f'search must be "best_first" or "mcts", not "{search}"')
    if reward not in ("mean", "sum", "constant"):
        raise UsageError(f'reward must be "mean", "sum" or "constant", not "{reward}"')
    least = 2 if search == "mcts" else 1
    for name, value in (("num_nodes", num_nodes), ("depth", depth)):
        if value < least:
            raise UsageError(f'{name} must be at least {least} with search="{search}", not {value}')
    if iterations < 1:
        raise UsageError(f"iterations must be at least 1, not {iterations}")
    ngrams.check_buckets(buckets)
    paths = min(MOST_VISITED, num_nodes // 2)

    def init(params, context: Context) -> AdedState:
        if params and params.ages.shape[1] != buckets:
            raise UsageError(f"buckets must be that of the corpus table, {params.ages.shape[1]}, not {buckets}")
        table = ngrams.empty(context.tokens.shape[0], buckets, WAYS, 3, np.float32(0))
        return AdedState(ngrams.learn_text(table, context.tokens, context.length, 3, _teach), context.length)

    def propose(params, keys: Array, state: AdedState, context: Context, limit: Array):
        count = RECENT - 2
        recent, inside = ngrams.windows(context.tokens, context.length, context.length - RECENT, count, 3)
        grown = context.length > state.length  # not so for rows that are done, and on the first draft
        table = _teach(state.table, recent, inside & grown[:, None])
        pair = ngrams.windows(context.tokens, context.length, context.length - 2, 1, 2)[0][:, 0]
        successors = lambda table, pairs: _successors(params, table, pairs)
        if search == "best_first":
            tree = best_first(functools.partial(successors, table), pair, limit, num_nodes, depth)
        else:

            def one_row(table, pair, key):
                row = jax.tree.map(lambda x: x[None], table)
                of_pairs = lambda pairs: jax.tree.map(lambda x: x[0], successors(row, pairs[None]))
                return monte_carlo(of_pairs, pair, key, iterations, depth - 1, paths, reward)

            tokens, parents, depths, valid = jax.vmap(one_row)(table, pair, keys)
            tree = TokenTree(tokens, parents, valid & (depths <= limit[:, None]))
        one = context.length[:, None] < 2  # no pair yet
        tree = tree._replace(valid=tree.valid & (~one | (jnp.arange(tree.valid.shape[1]) == 0)))
        return compact(tree), AdedState(table, context.length)

    def remember(params, state: AdedState) -> ngrams.Table:
        known = params or ngrams.empty(1, buckets, WAYS, 3, np.float32(0))
        return ngrams.merge(known, state.table, lambda old, new: jnp.minimum(old + new, CAP))

    drafted = num_nodes if search == "best_first" else 2 * paths
    return Drafter(
        propose=propose,
        size=TreeSize(drafted + 1, depth),
        init=init,
        traits=Traits(widths=tuple(w for w in (1, 8, 16, 32) if w <= drafted)),
        hooks=Hooks(export=remember),
    )


def make_aded(*, datastore: Datastore | None = None, **options) -> Drafter:
    """Return `aded`, with the tri-grams of a datastore as parameters if there is one."""
    drafter = aded(**options)
    if datastore is None:
        return drafter
    texts: list[Any] = list(datastore.documents())
    size = {"buckets": options["buckets"]} if "buckets" in options else {}
    return drafter.replace(params=corpus_table(texts, **size))


def corpus_table(texts: Sequence[Sequence[int]], *, buckets: int = 4096) -> ngrams.Table:
    """The tri-grams of a corpus as params of `aded`: per pair the 12 likeliest successors with their shares. Numpy.

    Where pairs crowd a bucket, the tri-grams that occur most often stay.
    Raises: UsageError for bad buckets.
    """
    ngrams.check_buckets(buckets)
    parts = [np.asarray(text, np.int32) for text in texts]
    every = [np.stack([x[:-2], x[1:-1], x[2:]], 1) for x in parts if len(x) > 2] or [np.zeros((0, 3), np.int32)]
    grams, counts = np.unique(np.concatenate(every), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")  # of equal counts the lower ids first
    grams, counts = grams[order], counts[order]
    _, pair = np.unique(grams[:, :2], axis=0, return_inverse=True)
    pair = pair.reshape(-1)
    shares = counts / np.bincount(pair, counts, minlength=1)[pair]
    here = ngrams.bucket(grams[:, :2], buckets)
    kept = _rank_within(pair) < WAYS
    grams, shares, here = grams[kept], shares[kept], here[kept]
    way = _rank_within(here)
    fits = way < WAYS
    place = 0, here[fits], way[fits]
    held = np.full((1, buckets, WAYS, 3), ngrams.FREE, np.int32)
    ages, values = np.zeros((1, buckets, WAYS), np.int32), np.zeros((1, buckets, WAYS), np.float32)
    held[place], ages[place], values[place] = grams[fits], 1, shares[fits]
    rows = held.reshape(1, buckets, -1)
    return ngrams.Table(*map(jnp.asarray, (rows, ages, values, np.ones((1,), np.int32))))


def _rank_within(group: np.ndarray) -> np.ndarray:
    """Of each element how many of the same group stand before it."""
    order = np.argsort(group, kind="stable")
    _, start, count = np.unique(group, return_index=False, return_inverse=True, return_counts=True)
    first = np.cumsum(count) - count
    rank = np.empty(len(group), int)
    rank[order] = np.arange(len(group)) - first[start[order]]
    return rank


def _teach(table: ngrams.Table, grams: Array, wanted: Array) -> ngrams.Table:
    """One bonus for each tri-gram int32[B, M, 3] as often as it is wanted."""
    found = ngrams.find(table, grams, prefix=2)
    old = jnp.sum(jnp.where(found.hit, found.values, 0.0), 2)
    times = jnp.sum(ngrams.equal(grams) & wanted[:, None, :], 2)
    return ngrams.write(table, grams, jnp.minimum(old + BONUS * times, CAP), wanted, prefix=2)


def _successors(params: PyTree, table: ngrams.Table, pairs: Array) -> tuple[Array, Array]:
    """What may follow pairs int32[B, M, 2]: tokens int32[B, M, C] and their scores float32[B, M, C], 0: none.

    C is 12, or 24 with a corpus, whose successors come first.
    """

    def of(table):
        found = ngrams.find(table, pairs)
        return jnp.where(found.hit, found.grams[..., 2], -1), jnp.where(found.hit, found.values, 0.0)

    tokens, scores = of(table)
    if params:
        known, shares = of(params)
        same = (known[..., :, None] == tokens[..., None, :]) & (scores > 0)[..., None, :]
        shares += jnp.sum(jnp.where(same & (shares > 0)[..., :, None], scores[..., None, :], 0.0), -1)
        scores = jnp.where(jnp.any(same, -2), 0.0, scores)
        tokens, scores = jnp.concatenate([known, tokens], -1), jnp.concatenate([shares, scores], -1)
    return jnp.maximum(tokens, 0), jnp.minimum(scores, CAP)
