"""Tokens per target pass, from acceptance rates. Plain formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specjax.trees.shape_search.best_shapes import Paths


def expected_tokens(paths: Paths, acceptance: Sequence[float]) -> float:
    """Return the tokens per target pass of a static tree: 1 + sum over its nodes of the product of a[rank] along the
    path.

    For a chain of k tokens that is the sum of a[0] ** j over j = 0 ... k.

    Args:
      acceptance: a[r] is the probability that the r-th child of an accepted node is the accepted child.
    """
    a = list(acceptance)
    probability = lambda path: math.prod(a[rank] if rank < len(a) else 0.0 for rank in path)
    return 1.0 + sum(probability(path) for path in paths)


def rank_acceptance(rate: float, ranks: int = 16) -> tuple[float, ...]:
    """Return a[r] = rate * (1 - rate) ** r: each sibling is accepted with probability `rate` after its predecessors
    fail.

    This assumption turns one number into a table. Siblings of real drafts are worth less; measure where it matters.
    """
    return tuple(rate * (1 - rate) ** r for r in range(ranks))
