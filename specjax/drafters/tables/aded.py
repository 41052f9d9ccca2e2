"""ADED: best-first or Monte Carlo search for a draft tree in a table of trigrams that adapts to the text.

Liu, Lei et al.: Adaptive Draft-Verification for Efficient Large Language Model Decoding (2024), arXiv 2407.12021.

Rule: the score P(c | a, b) of the trigram abc is its fraction of the corpus trigrams that begin with ab. A pair has at
most 12 successors. Before each draft every trigram of the last 16 tokens gets P <- min(P + 0.04, 3). The root of the
tree is the pair of the last two tokens.
  best_first: draft the paths with the largest product of P, normalised per pair.
  mcts: repeat `iterations` times. Descend from the root, to unvisited children first, else to the child with the
    largest value:
    s / n + P sqrt(N) / (1 + n) (32 + ln((N + 9) / 8)).
    N is the number of visits of the parent, n that of the child, and s the child's sum of rewards. Add all successors
    of the leaf as children and step to the last one. Complete the path to `depth` tokens by sampling successors from P,
    and add its reward to the path. The tree consists of the most visited paths, each with its most likely next token.
Guarantee: distribution. The search reads the past and the draft's own keys, never the noise of the target's draws. Its
tree is therefore a point mass for the verifier.
Deviations: best-first search is the default. It is the limit of mcts in which P alone decides. It runs level by level,
and not in 150 sequential iterations (the authors' number; here 32). The reward is (1 + sum of min(P, 1) along the path)
/ (depth + 1). The authors' code intends to sum P but looks up the wrong token, so its reward is nearly constant
(`reward="constant"`). Each row has its own table, which is empty at first and learns from the prompt too, one bonus per
occurrence. The table of a corpus is separate and constant; the scores of both tables are added. The draft is empty
after an unknown pair; the authors guess a token.
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
RECENT, BONUS, CAP = 16, 0.04, 3.0  # window, bonus per occurrence and maximum of the adaptation
MOST_VISITED = 24  # maximum number of paths of mcts


class AdedState(NamedTuple):
    """Trigrams of the row's own text."""

    table: ngrams.Table  # trigrams by their first two tokens; values float32: the sums of bonuses
    length: Array  # int32[B], length of the text at the last update of the table


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
    """Search a tree of up to `num_nodes` drafted tokens and depth `depth` in a table of trigrams.

    Args:
      search: "best_first" or "mcts". With "mcts" the tree has the num_nodes / 2 (at most 24) most visited paths. Each
        has up to depth - 1 tokens and one more token after these.
      iterations, reward: settings of mcts.
      buckets: number of buckets of the table, per row.

    Params: () or the trigrams of a corpus, `aded().replace(params=corpus_table(texts))`. `DecodeResult.drafter` has the
      trigrams of all rows in its parameters, with the scores added.
    State: AdedState; the table takes 240 x buckets bytes per row (1 MB by default).
    Raises: UsageError for a setting out of range.
    """
    if search not in ("best_first", "mcts"):
        raise UsageError(f'search must be "best_first" or "mcts", not "{search}"')
    if reward not in ("mean", "sum", "constant"):
        raise UsageError(f'reward must be "mean", "sum" or "constant", not "{reward}"')
    minimum = 2 if search == "mcts" else 1
    for name, value in (("num_nodes", num_nodes), ("depth", depth)):
        if value < minimum:
            raise UsageError(f'{name} must be at least {minimum} with search="{search}", not {value}')
    if iterations < 1:
        raise UsageError(f"iterations must be at least 1, not {iterations}")
    ngrams.check_buckets(buckets)
    paths = min(MOST_VISITED, num_nodes // 2)

    def init(params, context: Context) -> AdedState:
        if params and params.ages.shape[1] != buckets:
            raise UsageError(f"buckets must be that of the corpus table, {params.ages.shape[1]}, not {buckets}")
        table = ngrams.empty(context.tokens.shape[0], buckets, WAYS, 3, np.float32(0))
        return AdedState(ngrams.learn_text(table, context.tokens, context.length, 3, _add_bonus), context.length)

    def propose(params, keys: Array, state: AdedState, context: Context, limit: Array):
        count = RECENT - 2
        recent, is_recent = ngrams.windows(context.tokens, context.length, context.length - RECENT, count, 3)
        has_new_tokens = context.length > state.length  # false for finished rows, and for the first draft
        table = _add_bonus(state.table, recent, is_recent & has_new_tokens[:, None])
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
        is_single = context.length[:, None] < 2  # there is no pair yet
        tree = tree._replace(valid=tree.valid & (~is_single | (jnp.arange(tree.valid.shape[1]) == 0)))
        return compact(tree), AdedState(table, context.length)

    def remember(params, state: AdedState) -> ngrams.Table:
        parameters = params or ngrams.empty(1, buckets, WAYS, 3, np.float32(0))
        return ngrams.merge(parameters, state.table, lambda old, new: jnp.minimum(old + new, CAP))

    drafted = num_nodes if search == "best_first" else 2 * paths
    return Drafter(
        propose=propose,
        size=TreeSize(drafted + 1, depth),
        init=init,
        traits=Traits(widths=tuple(w for w in (1, 8, 16, 32) if w <= drafted)),
        hooks=Hooks(export=remember),
    )


def make_aded(*, datastore: Datastore | None = None, **options) -> Drafter:
    """Return `aded`, with the trigrams of a datastore as parameters if there is one."""
    drafter = aded(**options)
    if datastore is None:
        return drafter
    texts: list[Any] = list(datastore.documents())
    size = {"buckets": options["buckets"]} if "buckets" in options else {}
    return drafter.replace(params=corpus_table(texts, **size))


def corpus_table(texts: Sequence[Sequence[int]], *, buckets: int = 4096) -> ngrams.Table:
    """Build the params of `aded` from a corpus with NumPy: the 12 most likely successors per pair, with fractions.

    If a bucket overflows, the most frequent trigrams stay.

    Raises: UsageError for a bad number of buckets.
    """
    ngrams.check_buckets(buckets)
    parts = [np.asarray(text, np.int32) for text in texts]
    trigrams = [np.stack([x[:-2], x[1:-1], x[2:]], 1) for x in parts if len(x) > 2] or [np.zeros((0, 3), np.int32)]
    grams, counts = np.unique(np.concatenate(trigrams), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")  # for equal counts the lower ids come first
    grams, counts = grams[order], counts[order]
    _, pair = np.unique(grams[:, :2], axis=0, return_inverse=True)
    pair = pair.reshape(-1)
    shares = counts / np.bincount(pair, counts, minlength=1)[pair]
    bucket = ngrams.bucket(grams[:, :2], buckets)
    is_kept = _rank_within(pair) < WAYS
    grams, shares, bucket = grams[is_kept], shares[is_kept], bucket[is_kept]
    way = _rank_within(bucket)
    fits = way < WAYS
    target = 0, bucket[fits], way[fits]
    entries = np.full((1, buckets, WAYS, 3), ngrams.FREE, np.int32)
    ages, values = np.zeros((1, buckets, WAYS), np.int32), np.zeros((1, buckets, WAYS), np.float32)
    entries[target], ages[target], values[target] = grams[fits], 1, shares[fits]
    rows = entries.reshape(1, buckets, -1)
    return ngrams.Table(*map(jnp.asarray, (rows, ages, values, np.ones((1,), np.int32))))


def _rank_within(group: np.ndarray) -> np.ndarray:
    """Return for each element the number of earlier elements of the same group."""
    order = np.argsort(group, kind="stable")
    _, start, count = np.unique(group, return_index=False, return_inverse=True, return_counts=True)
    first = np.cumsum(count) - count
    rank = np.empty(len(group), int)
    rank[order] = np.arange(len(group)) - first[start[order]]
    return rank


def _add_bonus(table: ngrams.Table, grams: Array, is_new: Array) -> ngrams.Table:
    """Add one bonus per occurrence of trigrams int32[B, M, 3], where `is_new` bool[B, M] is true."""
    matches = ngrams.find(table, grams, prefix=2)
    old = jnp.sum(jnp.where(matches.hit, matches.values, 0.0), 2)
    times = jnp.sum(ngrams.equal(grams) & is_new[:, None, :], 2)
    return ngrams.write(table, grams, jnp.minimum(old + BONUS * times, CAP), is_new, prefix=2)


def _successors(params: PyTree, table: ngrams.Table, pairs: Array) -> tuple[Array, Array]:
    """Return successors int32[B, M, C] of pairs int32[B, M, 2], and their scores float32[B, M, C]; 0: no token.

    C is 12, or 24 with a corpus; the successors from the corpus come first.
    """

    def look_up(table):
        matches = ngrams.find(table, pairs)
        return jnp.where(matches.hit, matches.grams[..., 2], -1), jnp.where(matches.hit, matches.values, 0.0)

    tokens, scores = look_up(table)
    if params:
        corpus_tokens, shares = look_up(params)
        same = (corpus_tokens[..., :, None] == tokens[..., None, :]) & (scores > 0)[..., None, :]
        shares += jnp.sum(jnp.where(same & (shares > 0)[..., :, None], scores[..., None, :], 0.0), -1)
        scores = jnp.where(jnp.any(same, -2), 0.0, scores)
        tokens, scores = jnp.concatenate([corpus_tokens, tokens], -1), jnp.concatenate([shares, scores], -1)
    return jnp.maximum(tokens, 0), jnp.minimum(scores, CAP)
