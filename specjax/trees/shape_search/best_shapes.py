"""Search for the best static tree from measured acceptance: Sequoia's dynamic programme and Medusa's greedy search.

Chen et al.: Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding (2024), arXiv 2402.12374;
Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (2024), arXiv 2401.10774.

Both run once on the host in numpy, and return rank paths for `trees.static`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from specjax.errors import UsageError

Paths = tuple[tuple[int, ...], ...]


def sequoia(acceptance: Sequence[float], num_nodes: int, max_depth: int | None = None) -> tuple[float, Paths]:
    """Return the tree of `num_nodes` nodes, root included, with the most expected tokens per pass.

    Rule: let T(m, l, b) be the best value of a subtree of m nodes, at most l levels, and b children of its root. Then
      T(m, l, b) = max_y T(y, l, b - 1) + a_b max_b' T(m - y, l - 1, b').

    Args:
      acceptance: a_b, the probability that exactly the b-th child of a reached node is accepted, b = 1, 2, ...
      max_depth: levels below the root; None: no limit.

    Returns: (expected tokens per target pass, rank paths); (-inf, ()) if no tree of this depth has so many nodes.

    Raises: UsageError for values that are not probabilities, or num_nodes < 2.
    """
    a = np.asarray(acceptance, float)
    if a.ndim != 1 or not len(a) or not (a >= 0).all() or not a.sum() <= 1 + 1e-9:
        raise UsageError("acceptance must be probabilities that sum to at most 1")
    if num_nodes < 2:
        raise UsageError(f"num_nodes counts the root, so it must be at least 2, not {num_nodes}")
    m, levels, width = num_nodes, min(max_depth or num_nodes - 1, num_nodes - 1) + 1, len(a)
    value = np.full((m + 1, levels + 1, width + 1), -np.inf)
    split = np.zeros((m + 1, levels + 1, width + 1), int)
    value[1, 1:, 0] = 1.0
    for size in range(2, m + 1):
        for level in range(2, levels + 1):
            below = value[:, level - 1].max(1)  # value of a child by its number of nodes; -inf where they do not fit
            for b in range(1, width + 1):
                y = np.arange(1, size)
                worth = np.where(below > 0, a[b - 1] * np.maximum(below, 0), -np.inf)  # 0 times -inf is NaN
                total = value[y, level, b - 1] + worth[size - y]
                split[size, level, b] = y[np.argmax(total)]
                value[size, level, b] = total.max()

    def paths(size, level, b, root):
        if b:
            y = split[size, level, b]
            yield from paths(y, level, b - 1, root)
            child = (*root, b - 1)
            yield child
            yield from paths(size - y, level - 1, int(value[size - y, level - 1].argmax()), child)

    b = int(value[m, levels].argmax())
    return float(value[m, levels, b]), tuple(paths(m, levels, b, ()))


def medusa(accuracy: Sequence[Sequence[float]], num_tokens: int) -> tuple[float, Paths]:
    """Return the `num_tokens` likeliest rank paths.

    Args:
      accuracy: [depth][rank], probability that the token of this rank is right at this depth.

    Returns: (expected accepted tokens, rank paths in the order of their selection).

    Raises: UsageError for values that are not probabilities, or num_tokens < 1.
    """
    table = [list(row) for row in accuracy]
    if num_tokens < 1 or not table or any(not row or not all(0 <= x <= 1 for x in row) for row in table):
        raise UsageError("accuracy must be rows of probabilities between 0 and 1, and num_tokens at least 1")
    # Values decrease along ranks and depths, so the best next path is a neighbour of a selected one.
    queue: list[tuple[float, int, tuple[int, ...], float]] = [(-table[0][0], 0, (0,), 1.0)]
    selected: list[tuple[tuple[int, ...], float]] = []
    counter = 0
    while queue and len(selected) < num_tokens:
        negative, _, path, parent_value = heapq.heappop(queue)
        selected.append((path, -negative))
        depth, rank = len(path) - 1, path[-1]
        neighbours = []
        if depth + 1 < len(table):
            neighbours.append(((*path, 0), -negative * table[depth + 1][0], -negative))
        if rank + 1 < len(table[depth]):
            neighbours.append(((*path[:-1], rank + 1), parent_value * table[depth][rank + 1], parent_value))
        for new, value, parent in neighbours:
            counter += 1
            heapq.heappush(queue, (-value, counter, new, parent))
    return sum(value for _, value in selected), tuple(path for path, _ in selected)
