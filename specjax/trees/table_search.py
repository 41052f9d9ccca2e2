"""Trees searched in a table of successors: the most probable paths, and Monte Carlo tree search.

The search of Liu et al.: Adaptive Draft-Verification for Efficient Large Language Model Decoding (2024), arXiv
2407.12021; its rule to go down is that of Silver et al.: Mastering Chess and Shogi by Self-Play with a General
Reinforcement Learning Algorithm (2017), arXiv 1712.01815. What may follow depends on the last two tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.numerics.sampling import draw
from specjax.trees.operations import compact, cut
from specjax.types import Array, TokenTree

C1, C2 = 32.0, 8.0  # how much is explored
Reward = Literal["mean", "sum", "constant"]
Successors = Callable[[Array], tuple[Array, Array]]
"""Pairs of tokens -> what may follow, and its scores; 0: none."""


def best_first(successors: Successors, pair: Array, limit: Array, num_nodes: int, depth: int) -> TokenTree:
    """The `num_nodes` paths with the largest product of normalised scores after pairs int32[B, 2].

    Exact, not a beam: the best paths of a length continue best paths, so no level needs more than `num_nodes` of them.

    Args:
      successors: pairs int32[B, M, 2] -> tokens int32[B, M, C], scores float32[B, M, C].
      limit: int32[B], deepest level. depth: that of the loop.
    """
    batch, f = pair.shape[0], num_nodes

    def level(carry, number):
        pairs, value, ids = carry  # [B, F, 2], log of the product, node numbers
        tokens, scores = successors(pairs)
        share = jnp.log(scores) - jnp.log(jnp.maximum(jnp.sum(scores, -1, keepdims=True), 1e-9))
        share = jnp.where((number <= limit)[:, None, None], share, -jnp.inf)
        best, place = jax.lax.top_k((value[:, :, None] + share).reshape(batch, -1), f)
        above = place // scores.shape[-1]
        token = take_along(tokens.reshape(batch, -1), place, 1)
        pairs = jnp.stack([take_along(pairs[:, :, 1], above, 1), token], 2)
        parents = take_along(ids, above, 1)
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


def monte_carlo(
    successors: Successors, pair: Array, key: Array, iterations: int, horizon: int, paths: int, reward: Reward
):
    """The `paths` nodes that a Monte Carlo search of one row visits most, to depth `horizon`, and one below each.

    Args:
      successors: pairs int32[M, 2] -> tokens int32[M, C], scores float32[M, C]. pair: int32[2], where to begin.
      reward: of a completed path: "sum", 1 + the sum of its scores; "mean", (1 + that of min(score, 1)) /
        (horizon + 1); "constant", 1.

    Returns: tokens, parents, depths int32[2 paths + 1] and valid bool[2 paths + 1]: the most visited nodes, and of each
      the likeliest successor.
    """
    s = grow_search(successors, pair, key, iterations, horizon, reward)
    return _most_visited(successors, s, paths)


def grow_search(
    successors: Successors, pair: Array, key: Array, iterations: int, horizon: int, reward: Reward
) -> _Search:
    most = jax.eval_shape(successors, pair[None])[0].shape[-1]
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
            drawn = draw(jax.random.fold_in(key, step), jnp.log(scores))
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


def _most_visited(successors: Successors, s: _Search, paths: int):
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
    extra = take_along(following, likeliest[:, None], 1)[:, 0]
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
