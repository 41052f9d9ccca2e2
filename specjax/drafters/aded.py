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
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import ngrams
from specjax.errors import UsageError
from specjax.tree import compact, cut
from specjax.types import Array, Context, Drafter, PyTree, TokenTree

WAYS = 12  # successors of a pair
RECENT, BONUS, CAP = 16, 0.04, 3.0  # the adaptation
C1, C2, MOST_VISITED = 32.0, 8.0, 24  # the search


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
    reward: Literal["mean", "sum", "constant"] = "mean",
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
            tree = _best_first(functools.partial(successors, table), pair, limit, num_nodes, depth)
        else:

            def one_row(table, pair, key):
                of_pairs = lambda pairs: (x[0] for x in successors(jax.tree.map(lambda x: x[None], table), pairs[None]))
                return _mcts(of_pairs, pair, key, iterations, depth - 1, paths, reward)

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
        init=init,
        propose=propose,
        update=lambda params, state, tree, verdict, output: state,
        num_nodes=drafted + 1,
        max_depth=depth,
        widths=tuple(w for w in (1, 8, 16, 32) if w <= drafted),
        remember=remember,
    )


def corpus_table(texts: Sequence[Sequence[int]], *, buckets: int = 4096) -> ngrams.Table:
    """The tri-grams of a corpus as params of `aded`: per pair the 12 likeliest successors with their shares. Numpy.

    Where pairs crowd a bucket, the tri-grams that occur most often stay.
    Raises: UsageError for bad buckets.
    """
    ngrams.check_buckets(buckets)
    parts = [np.asarray(text, np.int32) for text in texts]
    grams = [np.stack([x[:-2], x[1:-1], x[2:]], 1) for x in parts if len(x) > 2] or [np.zeros((0, 3), np.int32)]
    grams, counts = np.unique(np.concatenate(grams), axis=0, return_counts=True)
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
    table = ngrams.Table(
        np.full((1, buckets, WAYS, 3), -1, np.int32),
        np.zeros((1, buckets, WAYS), np.int32),
        np.zeros((1, buckets, WAYS), np.float32),
        np.ones((1,), np.int32),
    )
    table.grams[place], table.ages[place], table.values[place] = grams[fits], 1, shares[fits]
    return jax.tree.map(jnp.asarray, table)


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


def _best_first(successors: Callable, pair: Array, limit: Array, num_nodes: int, depth: int) -> TokenTree:
    """The `num_nodes` paths of the largest product of normalised scores, from pair int32[B, 2].

    Exact: the best paths of a length continue best paths, so no level needs more than `num_nodes` of them.
    """
    batch, f = pair.shape[0], num_nodes

    def level(carry, number):
        pairs, value, ids = carry  # [B, F, 2], log of the product, node numbers
        tokens, scores = successors(pairs)
        share = jnp.log(scores) - jnp.log(jnp.maximum(jnp.sum(scores, -1, keepdims=True), 1e-9))
        share = jnp.where((number <= limit)[:, None, None], share, -jnp.inf)
        best, place = jax.lax.top_k((value[:, :, None] + share).reshape(batch, -1), f)
        above = place // scores.shape[-1]
        token = jnp.take_along_axis(tokens.reshape(batch, -1), place, 1)
        pairs = jnp.stack([jnp.take_along_axis(pairs[:, :, 1], above, 1), token], 2)
        parents = jnp.take_along_axis(ids, above, 1)
        ids = jnp.broadcast_to(1 + (number - 1) * f + jnp.arange(f), (batch, f))
        return (pairs, best, ids), (token, parents, best)

    start = (
        jnp.broadcast_to(pair[:, None], (batch, f, 2)),
        jnp.full((batch, f), -jnp.inf).at[:, 0].set(0.0),
        jnp.zeros((batch, f), jnp.int32),
    )
    _, levels = jax.lax.scan(level, start, jnp.arange(1, depth + 1))
    tokens, parents, values = (x.swapaxes(0, 1).reshape(batch, -1) for x in levels)
    # Of equal products the earlier node wins, so a path is never chosen before its beginning.
    best, chosen = jax.lax.top_k(values, f)
    chosen = jnp.where(best > -jnp.inf, chosen, depth * f)
    keep = jnp.zeros((batch, depth * f), bool).at[jnp.arange(batch)[:, None], chosen].set(True, mode="drop")
    before = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
    tree = TokenTree(before(tokens, 0).at[:, 0].set(pair[:, 1]), before(parents, -1), before(keep, True))
    return cut(compact(tree), num_nodes + 1)


class _Search(NamedTuple):
    """The tree of one row's search, M nodes; the children of a node stand side by side."""

    pairs: Array  # int32[M, 2], the last two tokens of the path
    parents: Array  # int32[M]
    depths: Array  # int32[M]
    prior: Array  # float32[M], P; 0: no such node
    gained: Array  # float32[M], the sum of P (clipped to 1, unless summed) along the path
    children: Array  # int32[M], the first child; 0: none yet
    visits: Array  # float32[M]
    rewards: Array  # float32[M]


def _mcts(successors: Callable, pair: Array, key: Array, iterations: int, horizon: int, paths: int, reward: str):
    """Monte Carlo tree search of one row from pair int32[2], over paths of up to `horizon` tokens.

    Returns: tokens, parents, depths int32[2 paths + 1] and valid bool[2 paths + 1]: the most visited nodes, and of each
      the likeliest successor.
    """
    s = _grow_search(successors, pair, key, iterations, horizon, reward)
    return _most_visited(successors, s, paths)


def _grow_search(successors, pair, key, iterations: int, horizon: int, reward: str) -> _Search:
    most = jax.eval_shape(lambda pairs: tuple(successors(pairs)), pair[None])[0].shape[-1]
    size = 1 + iterations * most
    gain = (lambda p: p) if reward == "sum" else lambda p: jnp.minimum(p, 1.0)

    def score(total):
        return {"sum": 1 + total, "mean": (1 + total) / (horizon + 1), "constant": jnp.ones_like(total)}[reward]

    def of_pair(pair):
        tokens, scores = successors(pair[None])
        return tokens[0], scores[0]

    def descend(s: _Search):
        node = jnp.int32(0)
        for _ in range(horizon):
            kids = s.children[node] + jnp.arange(most)
            n, total = s.visits[kids], s.visits[node]
            explore = s.prior[kids] * jnp.sqrt(total) / (1 + n) * (C1 + jnp.log((total + C2 + 1) / C2))
            value = jnp.where(n == 0, jnp.inf, s.rewards[kids] / jnp.maximum(n, 1) + explore)
            best = kids[jnp.argmax(jnp.where(s.prior[kids] > 0, value, -jnp.inf))]
            node = jnp.where(s.children[node] > 0, best, node)
        return node

    def expand(s: _Search, node, first):
        """All successors of a leaf become nodes `first`, ...; the last of them, or the leaf where there is none."""
        tokens, scores = of_pair(s.pairs[node])
        is_leaf = (s.children[node] == 0) & (s.depths[node] < horizon) & jnp.any(scores > 0)
        scores = jnp.where(is_leaf, scores, 0.0)
        put = lambda x, value: jax.lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), first, 0)
        every = lambda x: jnp.broadcast_to(x, (most,))
        s = s._replace(
            pairs=put(s.pairs, jnp.stack([every(s.pairs[node, 1]), tokens], 1)),
            parents=put(s.parents, every(node)),
            depths=put(s.depths, every(s.depths[node] + 1)),
            prior=put(s.prior, scores),
            gained=put(s.gained, s.gained[node] + gain(scores)),
            children=s.children.at[node].set(jnp.where(is_leaf, first, s.children[node])),
        )
        last = first + most - 1 - jnp.argmax(scores[::-1] > 0)
        return s, jnp.where(is_leaf, last, node)

    def roll_out(s: _Search, node, key):
        """The sum of P along the path to `node` and on to the horizon."""
        pair, total, going = s.pairs[node], s.gained[node], jnp.bool_(True)
        for step in range(horizon):
            tokens, scores = of_pair(pair)
            going &= (s.depths[node] + step < horizon) & jnp.any(scores > 0)
            race = jnp.log(scores) + jax.random.gumbel(jax.random.fold_in(key, step), scores.shape)
            drawn = jnp.argmax(race)
            total += jnp.where(going, gain(scores[drawn]), 0.0)
            pair = jnp.where(going, jnp.stack([pair[1], tokens[drawn]]), pair)
        return total

    def iteration(i, s: _Search):
        s, node = expand(s, descend(s), 1 + i * most)
        gained = score(roll_out(s, node, jax.random.fold_in(key, i)))
        for _ in range(horizon + 1):
            here = jnp.where(node >= 0, node, size)
            s = s._replace(
                visits=s.visits.at[here].add(1.0, mode="drop"), rewards=s.rewards.at[here].add(gained, mode="drop")
            )
            node = jnp.where(node >= 0, s.parents[node], -1)
        return s

    whole, real = jnp.zeros((size,), jnp.int32), jnp.zeros((size,), jnp.float32)
    start = _Search(
        jnp.zeros((size, 2), jnp.int32).at[0].set(pair), whole.at[0].set(-1), whole, real, real, whole, real, real
    )
    return jax.lax.fori_loop(0, iterations, iteration, start)


def _most_visited(successors, s: _Search, paths: int):
    size = len(s.visits)
    seen = jnp.where((jnp.arange(size) > 0) & (s.prior > 0), s.visits, -1.0)
    # Of equal visits the earlier node: parents stand before children.
    best, chosen = jax.lax.top_k(jnp.pad(seen, (0, max(paths - size, 0)), constant_values=-1.0), paths)
    chosen = jnp.sort(jnp.where(best > 0, chosen, size))
    valid = chosen < size
    node = jnp.minimum(chosen, size - 1)
    tokens = s.pairs[node, 1]
    parents = 1 + jnp.searchsorted(chosen, s.parents[node])
    parents = jnp.where(s.parents[node] == 0, 0, parents).astype(jnp.int32)
    following, scores = successors(s.pairs[node])
    likeliest = jnp.argmax(scores, 1)
    extra = jnp.take_along_axis(following, likeliest[:, None], 1)[:, 0]
    number = 1 + jnp.arange(paths, dtype=jnp.int32)
    there = jnp.any((parents == number[:, None]) & (tokens == extra[:, None]) & valid, 1)
    more = valid & jnp.any(scores > 0, 1) & ~there
    depths = s.depths[node]
    with_root = lambda root, *x: jnp.concatenate([jnp.full((1,), root, x[0].dtype), *x])
    return (
        with_root(0, tokens, extra).at[0].set(s.pairs[0, 1]),
        with_root(-1, parents, number),
        with_root(0, depths, depths + 1),
        with_root(True, valid, more),
    )
