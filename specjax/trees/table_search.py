"""Search for trees in a table of successors: the most probable paths, and Monte Carlo tree search.

The search is that of Liu et al.: Adaptive Draft-Verification for Efficient Large Language Model Decoding (2024), arXiv
2407.12021. Its selection rule is that of Silver et al.: Mastering Chess and Shogi by Self-Play with a General
Reinforcement Learning Algorithm (2017), arXiv 1712.01815. The possible next tokens depend on the last two tokens.
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

C1, C2 = 32.0, 8.0  # constants of the exploration term
Reward = Literal["mean", "sum", "constant"]
Successors = Callable[[Array], tuple[Array, Array]]
"""(pairs of tokens) -> possible next tokens and their scores; a score of 0 marks a missing token."""


def best_first(successors: Successors, pair: Array, limit: Array, num_nodes: int, depth: int) -> TokenTree:
    """Return the `num_nodes` paths after pairs int32[B, 2] with the largest product of normalised scores.

    The search is exact, not a beam search: the best paths of a length extend the best shorter paths. So no level needs
    more than `num_nodes` of them.

    Args:
      successors: pairs int32[B, M, 2] -> tokens int32[B, M, C], scores float32[B, M, C].
      limit: int32[B], deepest level. depth: static depth of the loop.
    """
    batch, f = pair.shape[0], num_nodes

    def level(carry, number):
        pairs, value, ids = carry  # [B, F, 2], log of the product, node numbers
        tokens, scores = successors(pairs)
        log_p = jnp.log(scores) - jnp.log(jnp.maximum(jnp.sum(scores, -1, keepdims=True), 1e-9))
        log_p = jnp.where((number <= limit)[:, None, None], log_p, -jnp.inf)
        best, place = jax.lax.top_k((value[:, :, None] + log_p).reshape(batch, -1), f)
        parent = place // scores.shape[-1]
        token = take_along(tokens.reshape(batch, -1), place, 1)
        pairs = jnp.stack([take_along(pairs[:, :, 1], parent, 1), token], 2)
        parents = take_along(ids, parent, 1)
        ids = jnp.broadcast_to(1 + (number - 1) * f + jnp.arange(f), (batch, f))
        return (pairs, best, ids), (token, parents, best)

    start = (
        jnp.broadcast_to(pair[:, None], (batch, f, 2)),
        jnp.full((batch, f), -jnp.inf).at[:, 0].set(0.0),
        jnp.zeros((batch, f), jnp.int32),
    )
    _, levels = jax.lax.scan(level, start, jnp.arange(1, depth + 1))
    tokens, parents, values = (x.swapaxes(0, 1).reshape(batch, -1) for x in levels)
    # Among equal products the earlier node wins, so a path is never selected without its parent.
    best, place_of_best = jax.lax.top_k(values, f)
    place_of_best = jnp.where(best > -jnp.inf, place_of_best, depth * f)
    keep = jnp.zeros((batch, depth * f), bool).at[jnp.arange(batch)[:, None], place_of_best].set(True, mode="drop")
    prepend = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
    tree = TokenTree(prepend(tokens, 0).at[:, 0].set(pair[:, 1]), prepend(parents, -1), prepend(keep, True))
    return cut(compact(tree), num_nodes + 1)


class _Search(NamedTuple):
    """The search tree of one row, M nodes. The children of a node are contiguous."""

    pairs: Array  # int32[M, 2], the last two tokens of the path
    parents: Array  # int32[M]
    depths: Array  # int32[M]
    prior: Array  # float32[M], P, the score of the node; 0: no node
    gained: Array  # float32[M], the sum of P along the path (each clipped to 1 unless the reward is "sum")
    children: Array  # int32[M], first child; 0: no children yet
    visits: Array  # float32[M]
    rewards: Array  # float32[M]


def monte_carlo(
    successors: Successors, pair: Array, key: Array, iterations: int, horizon: int, paths: int, reward: Reward
):
    """Return the most visited nodes of a Monte Carlo search of one row, and a child of each.

    Args:
      successors: pairs int32[M, 2] -> tokens int32[M, C], scores float32[M, C]. pair: int32[2], start of the search.
      horizon: maximum depth. paths: number of nodes.
      reward: reward of a completed path. "sum": 1 + the sum of its scores. "mean": (1 + the sum of min(score, 1)) /
        (horizon + 1). "constant": 1.

    Returns: tokens, parents, depths int32[2 paths + 1] and valid bool[2 paths + 1]: the most visited nodes, and the
      likeliest successor of each.
    """
    s = grow_search(successors, pair, key, iterations, horizon, reward)
    return _most_visited(successors, s, paths)


def grow_search(
    successors: Successors, pair: Array, key: Array, iterations: int, horizon: int, reward: Reward
) -> _Search:
    branching = jax.eval_shape(successors, pair[None])[0].shape[-1]
    size = 1 + iterations * branching
    gain = (lambda p: p) if reward == "sum" else lambda p: jnp.minimum(p, 1.0)

    def score(total):
        return {"sum": 1 + total, "mean": (1 + total) / (horizon + 1), "constant": jnp.ones_like(total)}[reward]

    def successors_of(pair):
        tokens, scores = successors(pair[None])
        return tokens[0], scores[0]

    def descend(s: _Search):
        node = jnp.int32(0)
        for _ in range(horizon):
            children = s.children[node] + jnp.arange(branching)
            n, total = s.visits[children], s.visits[node]
            explore = s.prior[children] * jnp.sqrt(total) / (1 + n) * (C1 + jnp.log((total + C2 + 1) / C2))
            value = jnp.where(n == 0, jnp.inf, s.rewards[children] / jnp.maximum(n, 1) + explore)
            best = children[jnp.argmax(jnp.where(s.prior[children] > 0, value, -jnp.inf))]
            node = jnp.where(s.children[node] > 0, best, node)
        return node

    def expand(s: _Search, node, first):
        """Add all successors of a leaf as nodes from `first` on. Return the last of them, or `node` without any."""
        tokens, scores = successors_of(s.pairs[node])
        is_leaf = (s.children[node] == 0) & (s.depths[node] < horizon) & jnp.any(scores > 0)
        scores = jnp.where(is_leaf, scores, 0.0)
        put = lambda x, value: jax.lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), first, 0)
        repeat = lambda x: jnp.broadcast_to(x, (branching,))
        s = s._replace(
            pairs=put(s.pairs, jnp.stack([repeat(s.pairs[node, 1]), tokens], 1)),
            parents=put(s.parents, repeat(node)),
            depths=put(s.depths, repeat(s.depths[node] + 1)),
            prior=put(s.prior, scores),
            gained=put(s.gained, s.gained[node] + gain(scores)),
            children=s.children.at[node].set(jnp.where(is_leaf, first, s.children[node])),
        )
        last = first + branching - 1 - jnp.argmax(scores[::-1] > 0)
        return s, jnp.where(is_leaf, last, node)

    def roll_out(s: _Search, node, key):
        """Return the sum of P along the path to `node` and along a random path from there to the horizon."""
        pair, total, is_active = s.pairs[node], s.gained[node], jnp.bool_(True)
        for step in range(horizon):
            tokens, scores = successors_of(pair)
            is_active &= (s.depths[node] + step < horizon) & jnp.any(scores > 0)
            drawn = draw(jax.random.fold_in(key, step), jnp.log(scores))
            total += jnp.where(is_active, gain(scores[drawn]), 0.0)
            pair = jnp.where(is_active, jnp.stack([pair[1], tokens[drawn]]), pair)
        return total

    def iteration(i, s: _Search):
        s, node = expand(s, descend(s), 1 + i * branching)
        gained = score(roll_out(s, node, jax.random.fold_in(key, i)))
        for _ in range(horizon + 1):
            index = jnp.where(node >= 0, node, size)
            s = s._replace(
                visits=s.visits.at[index].add(1.0, mode="drop"), rewards=s.rewards.at[index].add(gained, mode="drop")
            )
            node = jnp.where(node >= 0, s.parents[node], -1)
        return s

    ints, floats = jnp.zeros((size,), jnp.int32), jnp.zeros((size,), jnp.float32)
    start = _Search(
        jnp.zeros((size, 2), jnp.int32).at[0].set(pair), ints.at[0].set(-1), ints, floats, floats, ints, floats, floats
    )
    return jax.lax.fori_loop(0, iterations, iteration, start)


def _most_visited(successors: Successors, s: _Search, paths: int):
    size = len(s.visits)
    visits = jnp.where((jnp.arange(size) > 0) & (s.prior > 0), s.visits, -1.0)
    # Among equal visit counts the earlier node is selected, because parents precede children.
    best, nodes = jax.lax.top_k(jnp.pad(visits, (0, max(paths - size, 0)), constant_values=-1.0), paths)
    nodes = jnp.sort(jnp.where(best > 0, nodes, size))
    valid = nodes < size
    node = jnp.minimum(nodes, size - 1)
    tokens = s.pairs[node, 1]
    parents = 1 + jnp.searchsorted(nodes, s.parents[node])
    parents = jnp.where(s.parents[node] == 0, 0, parents).astype(jnp.int32)
    following, scores = successors(s.pairs[node])
    likeliest = jnp.argmax(scores, 1)
    child = take_along(following, likeliest[:, None], 1)[:, 0]
    number = 1 + jnp.arange(paths, dtype=jnp.int32)
    is_duplicate = jnp.any((parents == number[:, None]) & (tokens == child[:, None]) & valid, 1)
    adds_child = valid & jnp.any(scores > 0, 1) & ~is_duplicate
    depths = s.depths[node]
    with_root = lambda root, *x: jnp.concatenate([jnp.full((1,), root, x[0].dtype), *x])
    return (
        with_root(0, tokens, child).at[0].set(s.pairs[0, 1]),
        with_root(-1, parents, number),
        with_root(0, depths, depths + 1),
        with_root(True, valid, adds_child),
    )
