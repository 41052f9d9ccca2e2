"""Which nodes to verify and how many prompts to read below each, by how many guesses there are: dynamic sparse trees.

Chen, Luk, Yiu, Li, Mishchenko, Venieris, Fan: Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration
of LLM Inference (2024), arXiv 2405.18628.

A round in state s knows guesses for the next s tokens, so its tree has at most s levels. The node where the accepted
path ends has c prompts below it, and what the target said of them are the guesses of the next round: state c. With
a[i, r], the chance that the guess of rank r is right at distance i,

    p(v) = the product of a along the path to v,   f(v) = p(v) - the sum of p over its children,

a round accepts the sum of p over its nodes, and the next one is in state c with the chance sum of f(v) over c(v) = c.
Candidates and prompts cost the same, a place in the pass: so which to take is one decision process. The policy of the
highest rate, tokens per cost in the long run, is found by Howard's iteration (1960). Given the rate g and what each
state is worth ahead of state 0, h, a state's best pass maximises

    1 + h(c(root)) + sum over v of p(v) (1 + h(c(v)) - h(c(above v))) - g cost(tokens),

exactly and for all numbers of tokens at once, by a dynamic programme over depth, rank and prompts of the node above.
Deviations: the authors take the likeliest nodes, give each all prompts, remove one after another where that loses
least but no node's last one, try sizes, and give the root none. The best pass may be any of these, and any other.
It runs on the host, once, in numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.trees.shape_search.best_shapes import Paths

RESTART = 1e-8
"""The chance of a round to be in state 0 anyhow: then any policy has one rate, wherever it starts."""

Accuracy = tuple[tuple[float, ...], ...]
"""[distance][rank], the chance that this guess is right."""


class Shape(NamedTuple):
    """What one pass reads: candidates by rank paths, and prompts below the root and each of these."""

    paths: Paths
    prompts: tuple[int, ...]  # the root's first

    def size(self, copies: int = 1) -> int:
        """Tokens of the pass."""
        return len(self.prompts) + copies * sum(self.prompts)


class Rates(NamedTuple):
    """What a policy does in the long run."""

    shares: np.ndarray  # float[S], of the rounds that are in each state
    accepted: np.ndarray  # float[S], candidates per round
    worth: np.ndarray  # float[S], tokens that a state is ahead of state 0, less what they cost
    rate: float  # tokens per cost

    @property
    def expected(self) -> float:
        """Accepted candidates per round."""
        return float(self.shares @ self.accepted)


def evaluate(shapes: Sequence[Shape], accuracy: Accuracy, costs: Sequence[float]) -> Rates:
    """Of the shapes of each state, 0 first, whose passes cost `costs`."""
    count = len(shapes)
    accepted, moves = np.zeros(count), np.zeros((count, count))
    for state, shape in enumerate(shapes):
        chance: dict[tuple[int, ...], float] = {(): 1.0}
        for path in sorted(shape.paths, key=len):
            chance[path] = chance[path[:-1]] * accuracy[len(path) - 1][path[-1]]
        last = dict(chance)
        for path in shape.paths:
            last[path[:-1]] -= chance[path]
        accepted[state] = sum(chance.values()) - 1
        for path, prompts in zip(((), *shape.paths), shape.prompts, strict=True):
            moves[state, prompts] += last[path]
    moves = (1 - RESTART) * moves
    moves[:, 0] += RESTART
    one = np.ones((1, count))
    shares = np.linalg.lstsq(np.vstack([moves.T - np.eye(count), one]), np.append(np.zeros(count), 1), rcond=None)[0]
    # h + g cost - moves h = 1 + accepted, with h(0) = 0: in its place stands the rate g.
    system = np.eye(count) - moves
    system[:, 0] = costs
    worth = np.linalg.solve(system, 1 + accepted)
    rate, worth[0] = worth[0], 0.0
    return Rates(shares, accepted, worth, float(rate))


@functools.cache
def dynamic_sparse(accuracy: Accuracy, costs: tuple[float, ...], copies: int = 1) -> tuple[Rates, tuple[Shape, ...]]:
    """The shapes of the highest rate, by state: 0 guesses, 1, ... as many as there are distances.

    Args:
      accuracy: by distance and rank. costs: of passes over 1, 2, ... tokens; the last is the widest that may be.
      copies: vectors per prompt.

    A round without guesses reads prompts, whether drafting pays or not: the rate of plain decoding is 1 / costs[0].
    States that no round is in have the shape of the next lower one that some are.
    Raises: UsageError for chances that are none, or no room for a candidate and a prompt.
    """
    if not accuracy or not all(row and min(row) >= 0 and sum(row) <= 1 + 1e-9 for row in accuracy):
        raise UsageError("accuracy must hold rows of chances of at least 0 that sum to at most 1, one row per distance")
    if len(costs) < 2 + copies:
        raise UsageError(
            f"a tree with prompts takes {2 + copies} tokens at least (the root, a candidate and a prompt of {copies}), "
            f"and the pass may have {len(costs)}"
        )
    cost = np.maximum.accumulate(np.asarray(costs, float))  # a wider pass is never cheaper, but for noise
    states = len(accuracy) + 1
    best: tuple[Rates, tuple[Shape, ...]] | None = None
    rate, worth = 1 / cost[0], np.arange(states) / states  # to begin with: guesses are worth something
    for _ in range(100):
        better = tuple(_best(accuracy[:state], cost, rate, (1 - RESTART) * worth, copies) for state in range(states))
        found = evaluate(better, accuracy, [cost[shape.size(copies) - 1] for shape in better])
        if best is not None and not _is_better(found, best[0]):
            break
        best, rate, worth = (found, better), found.rate, found.worth
    assert best is not None
    shapes = _reached(best[1])
    return evaluate(shapes, accuracy, [cost[shape.size(copies) - 1] for shape in shapes]), shapes


def _is_better(one: Rates, other: Rates) -> bool:
    """At the same rate a state may be worth more than it was: one that no round was in, and that others now lead to."""
    more = one.worth - other.worth > 1e-9 * np.maximum(np.abs(other.worth), 1)
    return one.rate > other.rate * (1 + 1e-12) or (one.rate > other.rate * (1 - 1e-12) and bool(more.any()))


def _reached(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    reached = {0}
    while more := {count for state in reached for count in shapes[state].prompts} - reached:
        reached |= more
    return tuple(shapes[max(other for other in reached if other <= state)] for state in range(len(shapes)))


def _best(accuracy: Accuracy, cost: np.ndarray, rate: float, worth: np.ndarray, copies: int) -> Shape:
    """The best pass of a state with guesses for as many distances as `accuracy` has, in state 0 one with prompts."""
    room, prompts = len(cost), np.arange(len(worth))  # prompts: how many a node may have
    # below[c][k]: of a node with c prompts, the value of its children in k places, in units of its own chance.
    below = np.zeros((len(worth), room))
    levels = []
    for row in reversed(accuracy):
        child = np.full((len(worth), len(worth), room), -np.inf)  # [c above, c, places of the child and what is below]
        for c in prompts:
            places = 1 + copies * c
            if places < room:
                child[:, c, places:] = 1 + worth[c] - worth[:, None] + below[c, : room - places]
        ranks = []
        siblings = np.zeros((len(worth), room))  # the value of those of higher ranks
        for chance in reversed(row):
            ranks.append((chance, siblings))
            siblings = np.maximum(siblings, _splits(chance, child, siblings).max(2))  # with such a child, or without
        levels.append((child, ranks[::-1]))
        below = siblings
    value = np.full((len(worth), room), -np.inf)  # [prompts of the root, places besides it]
    for c in prompts[0 if accuracy else 1 :]:
        if copies * c < room:
            value[c, copies * c :] = 1 + worth[c] + below[c, : room - copies * c]
    c, places = np.unravel_index(np.argmax(value - rate * cost), value.shape)
    paths: list[tuple[tuple[int, ...], int]] = []
    _trace(levels[::-1], int(c), int(places) - copies * int(c), (), copies, paths)
    paths.sort(key=lambda entry: (len(entry[0]), entry[0]))
    return Shape(tuple(path for path, _ in paths), (int(c), *(count for _, count in paths)))


def _splits(chance: float, child: np.ndarray, siblings: np.ndarray) -> np.ndarray:
    """float[C, K, J]: what k places are worth if a child takes j of them, and the siblings after it the others."""
    best = child.max(1)  # [C, J]
    left = np.arange(best.shape[1])[:, None] - np.arange(best.shape[1])
    fits = (left >= 0) & (best > -np.inf)[:, None, :]
    return np.where(fits, chance * np.where(fits, best[:, None, :], 0) + siblings[:, np.maximum(left, 0)], -np.inf)


def _trace(levels: list, above: int, places: int, path: tuple[int, ...], copies: int, found: list) -> None:
    """Add to `found` the children of a node with `above` prompts in so many places, with their prompts, and on."""
    if not levels:
        return
    child, ranks = levels[0]
    for rank, (chance, siblings) in enumerate(ranks):
        splits = _splits(chance, child[above : above + 1], siblings[above : above + 1])[0, places]
        taken = int(np.argmax(splits))
        if not splits[taken] > siblings[above, places]:
            continue
        count = int(np.argmax(child[above, :, taken]))
        found.append(((*path, rank), count))
        _trace(levels[1:], count, taken - 1 - copies * count, (*path, rank), copies, found)
        places -= taken
