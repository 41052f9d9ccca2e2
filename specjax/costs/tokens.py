"""Tokens per target pass, from acceptance rates. Plain formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specjax.trees.shape_search.best_shapes import Paths


def expected_tokens(paths: Paths, acceptance: Sequence[float]) -> float:
    """Tokens per target pass of a static tree: 1 + the sum over its nodes of the product of a[rank] along their path.

    acceptance: a[r], the chance that the r-th child of an accepted node is the accepted one. For a chain of k tokens
    that is the sum of a[0] ** j over j = 0 ... k.
    """
    a = list(acceptance)
    chance = lambda path: math.prod(a[rank] if rank < len(a) else 0.0 for rank in path)
    return 1.0 + sum(chance(path) for path in paths)


def rank_acceptance(rate: float, ranks: int = 16) -> tuple[float, ...]:
    """a[r] = rate * (1 - rate) ** r: each sibling is accepted with chance `rate` once those before it are refused.

    An assumption, for tables by one number; siblings of real drafts are worth less. Measure where it matters.
    """
    return tuple(rate * (1 - rate) ** r for r in range(ranks))
