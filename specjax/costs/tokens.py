"""Tokens per target pass, from plain formulas of acceptance rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specjax.trees.shape_search.best_shapes import Paths


def expected_tokens(paths: Paths, acceptance: Sequence[float]) -> float:
    """Return the tokens per target pass of a static tree.

    They are 1 + the sum over its nodes of the product of a[rank] along the path. For a chain of k tokens this is the
    sum of a[0] ** j over j = 0 ... k.

    Args:
      acceptance: a[r] is the probability that the r-th child of an accepted node is the accepted child.
    """
    a = list(acceptance)
    probability = lambda path: math.prod(a[rank] if rank < len(a) else 0.0 for rank in path)
    return 1.0 + sum(probability(path) for path in paths)


def rank_acceptance(rate: float, ranks: int = 16) -> tuple[float, ...]:
    """Return a[r] = rate * (1 - rate) ** r, acceptance rates by rank from a single number.

    The assumption is that each sibling is accepted with probability `rate` if its predecessors are not. Siblings of
    real drafts are worth less, so measure the rates where they matter.
    """
    return tuple(rate * (1 - rate) ** r for r in range(ranks))
