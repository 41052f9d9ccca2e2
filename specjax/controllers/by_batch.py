"""A static table of depths by batch size: the larger the batch, the shorter the draft.

Rule: use the depth of the first entry whose batch size is not exceeded, and `above` for larger batches. It is the
baseline of Liu et al.: Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (2024),
arXiv 2406.14066. Drafted tokens are nearly free while the target is memory-bound, and expensive once it is
compute-bound.
The batch size is that of the call and includes finished rows. The depth decides which random numbers a sampled draft
uses. So a sampled text depends on the batch size, but its distribution does not. Greedy and coupled texts do not.
LADDER is for dense models. A mixture of experts reads more experts for more tokens, so its table follows from the costs
of its passes (`by_batch_for`).
"""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np

from specjax import costs as cost_curves
from specjax.arrays.batch_axes import shared
from specjax.errors import UsageError
from specjax.types import Controller

LADDER = ((1, 7), (4, 5), (16, 3), (32, 2), (64, 1))
"""(largest batch, depth). These values are a starting point; measure your own."""


ACCEPTANCE = 0.7
"""Acceptance rate of each drafted token for which `ladder_of` chooses depths."""


def ladder_of(
    costs: cost_curves.Costs = None, dtype: cost_curves.WeightDtype = "float32", *, draft_cost: float = 0.0,
    shares: cost_curves.Shares = cost_curves.NO_SHARES,
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Return a table for a mixture of experts: the depths with most tokens per cost.

    Args:
      costs, dtype, draft_cost, shares: as for `goodput`. Costs that are numbers have no width, so they are not used.
    """
    depths = np.asarray([0, *sorted({depth for _, depth in LADDER})])
    curve = costs if isinstance(costs, cost_curves.Curve) else None
    tokens = (1 - ACCEPTANCE ** (depths + 1)) / (1 - ACCEPTANCE)

    def best(batch: int) -> int:
        passes = cost_curves.evaluate(curve, [int(depth) + 1 for depth in depths], batch, dtype, shares=shares)
        return int(depths[np.argmax(tokens / (passes + draft_cost * depths))])

    return tuple((batch, best(batch)) for batch, _ in LADDER)


@functools.cache
def by_batch(ladder: tuple[tuple[int, int], ...] = LADDER, *, above: int = 0) -> Controller:
    """Build a controller from a table of (largest batch, depth).

    Raises: UsageError for an empty table, sizes that do not increase, or a negative depth.
    """
    sizes = [size for size, _ in ladder]
    if not ladder or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise UsageError(f"the batch sizes of a ladder must be at least 1 and increasing, not {sizes}")
    if min(above, *(depth for _, depth in ladder)) < 0:
        raise UsageError(f"depths must be at least 0, not {[*(depth for _, depth in ladder), above]}")

    def depth_at(batch: int) -> int:
        return next((depth for size, depth in ladder if batch <= size), above)

    return Controller(
        init=lambda batch: jnp.full((batch,), depth_at(batch), jnp.int32),
        limit=lambda state: state,
        update=lambda state, info: state,
        axes=shared,
    )


def by_batch_for(
    costs: cost_curves.Costs, dtype: cost_curves.WeightDtype, *, draft_cost: float, shares: cost_curves.Shares
) -> Controller:
    """Build the controller of a target: by LADDER, or for a mixture of experts by `ladder_of`, with its arguments."""
    if shares.experts.sizes is None:
        return by_batch()
    return by_batch(ladder_of(costs, dtype, draft_cost=draft_cost, shares=shares))
