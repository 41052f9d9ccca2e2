"""Goodput: draft at the depth that emits most tokens per second, or not at all if speculation is slower.

Liu et al.: Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (SmartSpec, 2024),
arXiv 2406.14066.

Rule: A_j is the acceptance rate of the j-th drafted token, given that all tokens before it were accepted. A token that
the drafter could have drafted and did not counts as rejected, because the rows that draft set the cost for all. A row
with depth k expects 1 + sum over i <= k of A_1 ... A_i tokens. Choose the depth with the most expected tokens of the
batch per cost of the step. The cost is one target pass over k + 1 tokens per row, rounded up to a compiled width, plus
k passes of the drafter. The depth is the same for all rows, because in a padded batch the widest row sets the cost.
For a mixture of experts the estimated cost of a pass follows the number of experts that passes read (`costs.sharing`).
Steps at depth 0 give no information. So some steps draft the smallest depth above 0. They add at most `probe_share` to
the time.
Deviations: the smoothing and search of the authors are not published. Here A_j is a moving average over all rows, and
an average per row once that row has reached position j `own_after` times. Their draft lengths per request need a pass
over packed tokens, which this engine does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import costs as cost_curves
from specjax.arrays.batch_axes import SHARED, rows_first, shared
from specjax.costs.sharing import ExpertSharing, corrected_costs, init_sharing, observe_sharing, update_sharing
from specjax.errors import UsageError
from specjax.types import Array, Controller, Info, PyTree


class State(NamedTuple):
    rate: Array  # float32[K], A_j over all rows
    row_rate: Array  # float32[B, K], A_j per row
    visits: Array  # int32[B, K], number of steps that reached position j
    depth: Array  # int32[], the depth chosen last
    rounds: Array  # int32[], number of steps
    sharing: ExpertSharing | tuple[()] = ()  # of a mixture of experts whose passes have estimated costs
    evidence: PyTree = ()  # state of `Evidence`, shared by all rows


class Evidence(NamedTuple):
    """The source of acceptance rates: `observe(state, info, K) -> (rates float32[B, K], seen bool[B, K], state)`."""

    init: Callable[[int], PyTree]  # (K) -> state
    observe: Callable[[PyTree, Info, int], tuple[Array, Array, PyTree]]
    reads_confidence: bool = False


def has_ended(info: Info) -> Array:
    """Return bool[B]: rows whose text ended with a drafted token, after which nothing was tried."""
    return info.hit_eos & (info.accepted == info.emitted)


def _count_accepted(state: PyTree, info: Info, size: int) -> tuple[Array, Array, PyTree]:
    """Observe the accepted tokens: positions are seen down to the first that was not accepted."""
    place = jnp.arange(size)
    offered = info.drafted_depth if info.offered_depth is None else info.offered_depth
    tried = place < jnp.where(has_ended(info), jnp.minimum(offered, info.accepted), offered)[:, None]
    reached = (place <= info.accepted[:, None]) & tried & info.active[:, None]
    return (place < info.accepted[:, None]).astype(jnp.float32), reached, state


ACCEPTED = Evidence(lambda size: (), _count_accepted)


@functools.cache
def goodput(
    depths: tuple[int, ...] = (0, 1, 2, 3, 5, 7),
    *,
    costs: cost_curves.Costs = None,
    dtype: cost_curves.WeightDtype = "float32",
    draft_cost: float = 0.0,
    shares: cost_curves.Shares = cost_curves.NO_SHARES,
    start: float = 0.7,
    smoothing: float = 0.05,
    own_after: int = 20,
    probe_share: float = 0.01,
    margin: float = 1.03,
    widths: tuple[int, ...] | None = None,
) -> Controller:
    """Build a controller that chooses among `depths`, for a drafter of chains.

    Args:
      depths: increasing from 0.
      costs: cost of a target pass over depth + 1 tokens per row, relative to a pass over one token. It is a curve from
        `specjax.costs` or a tuple of numbers. None selects the rule of thumb for the batch and `dtype`.
      dtype: dtype of the target's parameters.
      draft_cost: cost of one drafter pass in the same unit.
      shares: of the bytes that a pass moves besides the weights (`costs.shares_of`), for the rule of thumb.
      start: initial acceptance rate. smoothing: weight of a new observation in the moving averages.
      own_after: number of observations after which a row uses its own acceptance rate at a position.
      probe_share: time that drafts at the smallest depth above 0 may add while the chosen depth is 0, as a share.
      margin: factor by which another depth must be better to replace the current one.
      widths: numbers of tokens per row for which the target pass is compiled. None: those of the drafter.

    Raises: UsageError for depths that do not increase from 0, for costs whose length differs from that of `depths`, or
      for a share that is not above 0 and at most 1.
    """
    return by_costs(
        ACCEPTED, depths, costs=costs, dtype=dtype, draft_cost=draft_cost, shares=shares, start=start,
        smoothing=smoothing, own_after=own_after, probe_share=probe_share, margin=margin, widths=widths,
    )  # fmt: skip


@functools.cache
def by_costs(
    evidence: Evidence,
    depths: tuple[int, ...],
    *,
    costs: cost_curves.Costs,
    dtype: cost_curves.WeightDtype,
    draft_cost: float,
    shares: cost_curves.Shares,
    start: float,
    smoothing: float,
    own_after: int,
    probe_share: float,
    margin: float,
    widths: tuple[int, ...] | None,
) -> Controller:
    """Build a controller that compares expected tokens with costs. Args and errors: see `goodput`.

    evidence: the source of the acceptance rates.
    """
    if len(depths) < 2 or depths[0] != 0 or list(depths) != sorted(set(depths)):
        raise UsageError(f"depths must increase from 0, such as 0, 1, 3, not {list(depths)}")
    cost_curves.check(costs, len(depths), "depth")
    if not 0 < probe_share <= 1:
        raise UsageError(f"probe_share must be above 0 and at most 1, not {probe_share}")
    max_depth = depths[-1]

    sizes = None if costs else shares.experts.sizes
    passes = tuple(next((width for width in widths or () if width > depth), depth + 1) for depth in depths)

    def step_costs(batch: int, sharing: ExpertSharing | tuple[()] = ()) -> np.ndarray | Array:
        target = cost_curves.evaluate(costs, passes, batch, dtype, shares=shares)
        if isinstance(sharing, ExpertSharing):
            added = cost_curves.added_by_experts(costs, passes, batch, dtype, shares=shares)
            return corrected_costs(target, added, passes, sharing) + draft_cost * np.asarray(depths, np.float32)
        return target + draft_cost * np.asarray(depths)

    def init(batch: int) -> State:
        rate = jnp.full((max_depth,), start, jnp.float32)
        zeros = jnp.zeros((batch, max_depth))
        sharing = () if sizes is None else init_sharing()
        visits, depth, rounds = zeros.astype(jnp.int32), jnp.int32(depths[1]), jnp.int32(0)
        return State(rate, zeros + start, visits, depth, rounds, sharing, evidence.init(max_depth))

    def limit(state: State) -> Array:
        batch = len(state.row_rate)
        of_steps = jnp.asarray(step_costs(batch, state.sharing), jnp.float32)
        interval = jnp.maximum(jnp.ceil((of_steps[1] / of_steps[0] - 1) / probe_share - 1e-4), 2).astype(jnp.int32)
        probe = (state.depth == 0) & (state.rounds % interval == interval - 1)
        return jnp.broadcast_to(jnp.where(probe, depths[1], state.depth), (batch,))

    def update(state: State, info: Info) -> State:
        observed, reached, memory = evidence.observe(state.evidence, info, max_depth)
        row_rate = state.row_rate + smoothing * reached * (observed - state.row_rate)
        count = jnp.sum(reached, 0)
        mean = jnp.sum(jnp.where(reached, observed, 0.0), 0) / jnp.maximum(count, 1)
        # Each row that reached a position counts as one observation.
        rate = state.rate + (1 - (1 - smoothing) ** count) * (mean - state.rate)
        visits = state.visits + reached
        acceptance = jnp.where(visits >= own_after, row_rate, rate)
        sharing = state.sharing
        if sizes is not None and isinstance(sharing, ExpertSharing) and info.experts is not None:
            experts, width = info.experts[0]
            sharing = update_sharing(sharing, observe_sharing(sizes, experts, len(info.experts), width))
        of_steps = jnp.asarray(step_costs(len(acceptance), sharing), jnp.float32)
        depth = best_depth(acceptance, info.active, state.depth, of_steps)
        return State(rate, row_rate, visits, depth, state.rounds + 1, sharing, memory)

    def best_depth(acceptance: Array, active: Array, depth: Array, of_steps: Array) -> Array:
        value = expected_tokens(acceptance, depths, active) / of_steps
        best, current = jnp.argmax(value), jnp.argmax(jnp.asarray(depths) == depth)
        return jnp.asarray(depths)[jnp.where(value[best] > margin * value[current], best, current)]

    def axes(state: State) -> State:
        return rows_first(state)._replace(
            rate=SHARED, depth=SHARED, rounds=SHARED, sharing=shared(state.sharing), evidence=shared(state.evidence)
        )

    def for_widths(widths: tuple[int, ...]) -> Controller:
        return by_costs(
            evidence, depths, costs=costs, dtype=dtype, draft_cost=draft_cost, shares=shares, start=start,
            smoothing=smoothing, own_after=own_after, probe_share=probe_share, margin=margin, widths=widths,
        )  # fmt: skip

    fit = for_widths if widths is None else None
    return Controller(
        init, limit, update, reads_experts=sizes is not None, reads_confidence=evidence.reads_confidence, axes=axes,
        for_widths=fit,
    )  # fmt: skip


def expected_tokens(acceptance: Array, depths: tuple[int, ...], active: Array | None = None) -> Array:
    """Return the expected tokens of one step at each depth, summed over the batch: float32[D].

    Args:
      acceptance: float32[B, K], acceptance rate by position.
      active: bool[B], rows that are not finished; others emit nothing. None means all rows.
    """
    reach = jnp.cumsum(jnp.cumprod(acceptance, 1), 1)  # [B, K]
    reach = jnp.pad(reach, ((0, 0), (1, 0)))[:, np.asarray(depths)]
    return jnp.sum(1 + reach, 0, where=True if active is None else active[:, None])
