"""Goodput: the depth at which a step emits most tokens per second, 0 where speculation does not pay.

Liu et al.: Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (SmartSpec, 2024),
arXiv 2406.14066.

Rule: A_j is how often the j-th drafted token was accepted when those before it were. A row of depth k expects
1 + sum over i <= k of A_1 ... A_i tokens. Of the depths offered, take the one with the most expected tokens of the
whole batch per cost of the step, which is the pass over k + 1 tokens per row and k passes of the drafter, none at depth
0. One depth for all rows: in a padded batch the widest row sets the price. Where nothing is drafted nothing is learnt,
so every `probe_every` rounds one round drafts the smallest depth above 0.
Deviation: the authors' smoothing and search are not published; A_j is a moving average here, over all rows, and per row
once it was reached `own_after` times. Their per-request lengths need a pass over packed tokens, which this is not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import costs as costs_of
from specjax.arrays.batch_axes import SHARED, rows_first
from specjax.errors import UsageError
from specjax.types import Array, Controller, Info


class _State(NamedTuple):
    rate: Array  # float32[K], A_j over all rows
    own: Array  # float32[B, K], per row
    seen: Array  # int32[B, K], how often position j was reached
    depth: Array  # int32[], the last choice
    rounds: Array  # int32[]


@functools.cache
def goodput(
    depths: tuple[int, ...] = (0, 1, 2, 3, 5, 7),
    *,
    costs: costs_of.Costs = None,
    dtype: str = "float32",
    draft_cost: float = 0.0,
    start: float = 0.7,
    smoothing: float = 0.05,
    own_after: int = 20,
    probe_every: int = 64,
    margin: float = 1.03,
) -> Controller:
    """Choose among `depths`, rising from 0, for a drafter of chains.

    Args:
      costs: from `specjax.costs`, or numbers, of a target pass over depth + 1 tokens per row in passes over one; None:
        the rule of thumb for the batch and the `dtype` of the target's parameters. draft_cost: of one pass of the
        drafter, in the same unit.
      start: acceptance before anything was seen. margin: by how much a change of depth must promise to pay.

    Raises: UsageError for depths that do not rise from 0, or costs that do not fit them.
    """
    if len(depths) < 2 or depths[0] != 0 or list(depths) != sorted(set(depths)):
        raise UsageError(f"depths must rise from 0, such as 0, 1, 3, not {list(depths)}")
    costs_of.check(costs, len(depths), "depth")
    longest = depths[-1]

    def init(batch: int) -> _State:
        rate = jnp.full((longest,), start, jnp.float32)
        none = jnp.zeros((batch, longest))
        return _State(rate, none + start, none.astype(jnp.int32), jnp.int32(depths[1]), jnp.int32(0))

    def limit(state: _State) -> Array:
        probe = (state.depth == 0) & (state.rounds % probe_every == probe_every - 1)
        return jnp.broadcast_to(jnp.where(probe, depths[1], state.depth), state.own.shape[:1])

    def update(state: _State, info: Info) -> _State:
        place = jnp.arange(longest)
        reached = (place <= info.accepted[:, None]) & (place < info.drafted_depth[:, None]) & info.active[:, None]
        accepted = place < info.accepted[:, None]
        step = smoothing * reached
        own = state.own + step * (accepted - state.own)
        count = jnp.sum(reached, 0)
        mean = jnp.sum(accepted & reached, 0) / jnp.maximum(count, 1)
        # Several rows at once are several observations.
        rate = state.rate + (1 - (1 - smoothing) ** count) * (mean - state.rate)
        seen = state.seen + reached
        known = jnp.where(seen >= own_after, own, rate)
        return _State(rate, own, seen, best_depth(known, info.active, state.depth), state.rounds + 1)

    def best_depth(acceptance: Array, active: Array, present: Array) -> Array:
        batch = acceptance.shape[0]
        target = costs_of.at(costs, [k + 1 for k in depths], batch, dtype)
        step = jnp.asarray(target + draft_cost * np.asarray(depths), jnp.float32)
        value = expected_tokens(acceptance, depths, active) / step
        best, now = jnp.argmax(value), jnp.argmax(jnp.asarray(depths) == present)
        return jnp.asarray(depths)[jnp.where(value[best] > margin * value[now], best, now)]

    def axes(state: _State) -> _State:
        return rows_first(state)._replace(rate=SHARED, depth=SHARED, rounds=SHARED)

    return Controller(init, limit, update, axes=axes)


def expected_tokens(acceptance: Array, depths: tuple[int, ...], active: Array | None = None) -> Array:
    """float32[D]: tokens that a step of the batch emits at each depth, for acceptance float32[B, K] by position.

    active: bool[B], rows that have not ended; the others emit none. None: all.
    """
    reach = jnp.cumsum(jnp.cumprod(acceptance, 1), 1)  # [B, K]
    reach = jnp.pad(reach, ((0, 0), (1, 0)))[:, np.asarray(depths)]
    return jnp.sum(1 + reach, 0, where=True if active is None else active[:, None])
