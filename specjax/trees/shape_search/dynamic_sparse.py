"""Dynamic sparse trees: the best nodes to verify and numbers of prompts below each, for each number of guesses.

Chen, Luk, Yiu, Li, Mishchenko, Venieris, Fan: Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration
of LLM Inference (2024), arXiv 2405.18628.

A round in state s has guesses for the next s tokens, so its tree has at most s levels. Let the last accepted node have
c prompts below it. The target's outputs at these prompts are the guesses of the next round, and its state is c. Let
a[i, r] be the probability that the guess of rank r is right at distance i, and

    p(v) = the product of a along the path to v,   f(v) = p(v) - the sum of p over its children.

A round accepts the sum of p over its nodes. The next round is in state c with probability sum of f(v) over c(v) = c.
Candidates and prompts have the same cost, one place in the pass, so their choice is one decision process. Howard's
iteration (1960) finds the policy of the highest rate, in tokens per cost in the long run. Given the rate g and the
advantage h of each state over state 0, a state's best pass maximises

    1 + h(c(root)) + sum over v of p(v) (1 + h(c(v)) - h(c(parent of v))) - g cost(tokens).

A dynamic program over depth, rank and the parent's prompts computes the exact maximum for all numbers of tokens.
Deviations: the authors take the likeliest nodes with all prompts each, and none at the root. They remove prompts one
after another where the loss is smallest, but never a node's last one, and try several sizes. The search here includes
their trees and all others.
It runs once on the host in numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.trees.shape_search.best_shapes import Paths

RESTART = 1e-8
"""Probability of an extra move to state 0 in each round, so that the rate of a policy does not depend on the start."""

Accuracy = tuple[tuple[float, ...], ...]
"""[distance][rank], probability that the guess is right."""


class SparseTree(NamedTuple):
    """Input of one pass: candidates as rank paths, and the numbers of prompts below the root and each candidate."""

    paths: Paths
    prompts: tuple[int, ...]  # the root's number first

    def size(self, copies: int = 1) -> int:
        """Return the number of tokens of the pass."""
        return len(self.prompts) + copies * sum(self.prompts)


class Rates(NamedTuple):
    """Long-run behaviour of a policy."""

    shares: np.ndarray  # float[S], share of the rounds in each state
    accepted: np.ndarray  # float[S], accepted candidates per round
    worth: np.ndarray  # float[S], advantage over state 0 in tokens, minus their cost
    rate: float  # tokens per unit of cost

    @property
    def expected(self) -> float:
        """Return the accepted candidates per round."""
        return float(self.shares @ self.accepted)


def evaluate(shapes: Sequence[SparseTree], accuracy: Accuracy, costs: Sequence[float]) -> Rates:
    """Return the rates of a policy, given the tree of each state (0 first) and the `costs` of their passes."""
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
    # Solve h + g cost - moves h = 1 + accepted with h(0) = 0; the unknown h(0) is replaced by the rate g.
    system = np.eye(count) - moves
    system[:, 0] = costs
    worth = np.linalg.solve(system, 1 + accepted)
    rate, worth[0] = worth[0], 0.0
    return Rates(shares, accepted, worth, float(rate))


@functools.cache
def dynamic_sparse(
    accuracy: Accuracy, costs: tuple[float, ...], copies: int = 1
) -> tuple[Rates, tuple[SparseTree, ...]]:
    """Return the trees of the highest rate, by state: 0 guesses, 1, ... up to the number of distances.

    Args:
      accuracy: probabilities by distance and rank.
      costs: costs of passes over 1, 2, ... tokens; the last is that of the widest pass allowed.
      copies: vectors per prompt.

    A round without guesses reads prompts even if drafting does not help. The rate of plain decoding is 1 / costs[0].
    Unreachable states get the tree of the next lower reachable state.

    Raises: UsageError for values that are not probabilities, or if a candidate and a prompt do not fit in a pass.
    """
    if not accuracy or not all(row and min(row) >= 0 and sum(row) <= 1 + 1e-9 for row in accuracy):
        raise UsageError("accuracy must be rows of probabilities that sum to at most 1, one row per distance")
    if len(costs) < 2 + copies:
        raise UsageError(
            f"a tree with prompts needs {2 + copies} tokens (the root, a candidate and a prompt of {copies}), but "
            f"costs cover passes of up to {len(costs)}; give more costs"
        )
    cost = np.maximum.accumulate(np.asarray(costs, float))  # a wider pass is cheaper only by measurement noise
    states = len(accuracy) + 1
    best: tuple[Rates, tuple[SparseTree, ...]] | None = None
    rate, worth = 1 / cost[0], np.arange(states) / states  # initial guess: more guesses are worth more
    for _ in range(100):
        candidate = tuple(_best(accuracy[:state], cost, rate, (1 - RESTART) * worth, copies) for state in range(states))
        rates = evaluate(candidate, accuracy, [cost[shape.size(copies) - 1] for shape in candidate])
        if best is not None and not _is_better(rates, best[0]):
            break
        best, rate, worth = (rates, candidate), rates.rate, rates.worth
    assert best is not None
    shapes = _reached(best[1])
    return evaluate(shapes, accuracy, [cost[shape.size(copies) - 1] for shape in shapes]), shapes


def _is_better(one: Rates, other: Rates) -> bool:
    """Return True if `one` has a higher rate, or the same rate and a higher worth in some state.

    At the same rate, an unused state may gain worth once other states lead to it.
    """
    more = one.worth - other.worth > 1e-9 * np.maximum(np.abs(other.worth), 1)
    return one.rate > other.rate * (1 + 1e-12) or (one.rate > other.rate * (1 - 1e-12) and bool(more.any()))


def _reached(shapes: tuple[SparseTree, ...]) -> tuple[SparseTree, ...]:
    reached = {0}
    while more := {count for state in reached for count in shapes[state].prompts} - reached:
        reached |= more
    return tuple(shapes[max(other for other in reached if other <= state)] for state in range(len(shapes)))


def _best(accuracy: Accuracy, cost: np.ndarray, rate: float, worth: np.ndarray, copies: int) -> SparseTree:
    """Return the best pass of a state whose guesses cover the distances of `accuracy`.

    In state 0 the pass always has prompts.
    """
    room, prompts = len(cost), np.arange(len(worth))  # prompts: possible numbers of prompts per node
    # below[c][k]: value of the children of a node with c prompts in k places, relative to the node's probability.
    below = np.zeros((len(worth), room))
    levels = []
    for row in reversed(accuracy):
        child = np.full((len(worth), len(worth), room), -np.inf)  # [c of the parent, c, places of the child's subtree]
        for c in prompts:
            places = 1 + copies * c
            if places < room:
                child[:, c, places:] = 1 + worth[c] - worth[:, None] + below[c, : room - places]
        ranks = []
        siblings = np.zeros((len(worth), room))  # value of the siblings of higher ranks
        for chance in reversed(row):
            ranks.append((chance, siblings))
            siblings = np.maximum(siblings, _splits(chance, child, siblings).max(2))  # with or without this child
        levels.append((child, ranks[::-1]))
        below = siblings
    value = np.full((len(worth), room), -np.inf)  # [prompts of the root, places without it]
    for c in prompts[0 if accuracy else 1 :]:
        if copies * c < room:
            value[c, copies * c :] = 1 + worth[c] + below[c, : room - copies * c]
    c, places = np.unravel_index(np.argmax(value - rate * cost), value.shape)
    paths: list[tuple[tuple[int, ...], int]] = []
    _trace(levels[::-1], int(c), int(places) - copies * int(c), (), copies, paths)
    paths.sort(key=lambda entry: (len(entry[0]), entry[0]))
    return SparseTree(tuple(path for path, _ in paths), (int(c), *(count for _, count in paths)))


def _splits(chance: float, child: np.ndarray, siblings: np.ndarray) -> np.ndarray:
    """Return float[C, K, J]: the value of k places if a child uses j of them and the later siblings use the others."""
    best = child.max(1)  # [C, J]
    rest_places = np.arange(best.shape[1])[:, None] - np.arange(best.shape[1])
    fits = (rest_places >= 0) & (best > -np.inf)[:, None, :]
    return np.where(
        fits, chance * np.where(fits, best[:, None, :], 0) + siblings[:, np.maximum(rest_places, 0)], -np.inf
    )


def _trace(levels: list, parent_prompts: int, places: int, path: tuple[int, ...], copies: int, nodes: list) -> None:
    """Append to `nodes` the best children of a node with `parent_prompts` prompts in `places` places, recursively."""
    if not levels:
        return
    child, ranks = levels[0]
    for rank, (chance, siblings) in enumerate(ranks):
        splits = _splits(
            chance, child[parent_prompts : parent_prompts + 1], siblings[parent_prompts : parent_prompts + 1]
        )[0, places]
        size = int(np.argmax(splits))
        if not splits[size] > siblings[parent_prompts, places]:
            continue
        count = int(np.argmax(child[parent_prompts, :, size]))
        nodes.append(((*path, rank), count))
        _trace(levels[1:], count, size - 1 - copies * count, (*path, rank), copies, nodes)
        places -= size
