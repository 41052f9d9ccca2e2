"""Choice of the draft tree from the cost of a target pass and the value of its nodes.

Chen et al.: Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding (2024), arXiv 2402.12374. Of all sizes n
and depths d, choose those that minimise (d * t_draft + t_target(n)) / T(n, d), the seconds per token. T(n, d) is the
value of the best tree (`specjax.trees.sequoia`) for the measured acceptance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specjax.costs.tokens import expected_tokens
from specjax.trees import sequoia
from specjax.trees.shape_search.best_shapes import Paths


@dataclass(frozen=True)
class Choice:
    """The best tree by one estimate of time."""

    side: str  # "schedule" or "roofline"
    num_nodes: int  # root included; 1: do not draft
    depth: int
    tokens: float  # expected tokens per target pass
    seconds_per_token: float
    speedup: float  # factor over plain decoding
    paths: tuple[tuple[int, ...], ...]  # rank paths, for trees.static
    spec: str | None  # the best tree of the form AxBxC, for --tree; None: do not draft
    spec_speedup: float


def choose(
    acceptance: Sequence[float], target: Sequence[tuple[int, float]], draft: float | Callable[[int], float],
    side: str = "", max_depth: int | None = None,
) -> Choice:  # fmt: skip
    """Return the tree with the fewest seconds per token.

    Args:
      acceptance: acceptance rates by rank. target: (nodes, seconds of a target pass), increasing, from one node on.
      draft: seconds of one pass of the draft model, which drafts one level, or a function from the depth of the tree to
        the seconds in which it is drafted.
      max_depth: the deepest tree that can be drafted; None: any.
    """
    sizes, seconds = [n for n, _ in target], [s for _, s in target]
    plain, deepest_allowed = seconds[0], max_depth or sizes[-1]
    drafting = draft if callable(draft) else lambda depth: depth * draft
    cost_of = lambda nodes, depth: drafting(depth) + float(np.interp(nodes, sizes, seconds))
    best: tuple[float, int, float, Paths] = (plain, 1, 1.0, ())
    for n in sizes[1:]:
        depths = range(1, min(n - 1, deepest_allowed) + 1) if draft else [min(n - 1, deepest_allowed)]
        for depth in depths:
            max_nodes = sum(sum(acceptance) ** j for j in range(depth + 1))  # every level full
            if cost_of(n, depth) / max_nodes >= best[0]:
                continue
            tokens, paths = sequoia(acceptance, n, depth)
            if not np.isfinite(tokens):
                continue  # no tree of this depth has so many nodes with these ranks
            per_token = cost_of(n, depth) / tokens
            if per_token < best[0] * (1 - 1e-9):
                best = per_token, n, tokens, paths
    spec, spec_seconds = _best_spec(acceptance, sizes[-1], cost_of, deepest_allowed)
    per_token, n, tokens, paths = best
    drafts, deepest = n > 1, max(map(len, paths), default=0)
    return Choice(
        side, n, deepest, float(tokens), per_token, plain / per_token, tuple(paths),
        spec if drafts else None, plain / spec_seconds if drafts else 1.0,
    )  # fmt: skip


def _best_spec(acceptance: Sequence[float], max_nodes: int, cost_of, max_depth: int) -> tuple[str, float]:
    """Return the best of the trees AxBxC within these limits, and its seconds per token."""
    best = ("1", cost_of(2, 1) / expected_tokens(((0,),), acceptance))
    levels: list[tuple[int, ...]] = [()]
    while levels:
        next_levels = []
        for widths, width in itertools.product(levels, range(1, len(acceptance) + 1)):
            if widths and width > widths[-1]:
                continue  # a deeper node is worth less, so it never pays to branch more there
            shape = (*widths, width)
            nodes = 1 + sum(int(np.prod(shape[: i + 1])) for i in range(len(shape)))
            if nodes > max_nodes or len(shape) > max_depth:
                continue
            next_levels.append(shape)
            mass = [sum(acceptance[:w]) for w in shape]  # probability that one child of a node is accepted, by level
            tokens = 1 + sum(float(np.prod(mass[: i + 1])) for i in range(len(shape)))
            seconds = cost_of(nodes, len(shape)) / tokens
            if seconds < best[1]:
                best = "x".join(map(str, shape)), seconds
        levels = next_levels
    return best
