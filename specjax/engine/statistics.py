"""Sums over the steps of a decode."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.types import Info, Stats


def zero_stats(batch: int, max_depth: int, debug: bool = False) -> Stats:
    """Sums before the first step."""
    row, by_depth = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, max_depth), jnp.int32)
    return Stats(row, row, row, by_depth, by_depth, jnp.zeros((batch,), bool), row if debug else None)


def add_stats(stats: Stats, info: Info) -> Stats:
    """Sums after one more step."""
    below = jnp.arange(stats.drafted_by_depth.shape[1])
    found = [bits for bits in (stats.violations, info.violations) if bits is not None]
    return Stats(
        target_passes=stats.target_passes + info.active,
        drafted=stats.drafted + info.drafted,
        accepted=stats.accepted + info.accepted,
        drafted_by_depth=stats.drafted_by_depth + (below < jnp.where(info.active, info.drafted_depth, 0)[:, None]),
        accepted_by_depth=stats.accepted_by_depth + (below < info.accepted[:, None]),
        hit_eos=stats.hit_eos | info.hit_eos,
        violations=functools.reduce(jnp.bitwise_or, found) if found else None,
    )


def add_round(stats: Stats, passes: Any, drafted: Any, accepted: Any) -> Stats:
    """Sums after a round of a loop without `Info`, as arrays of numpy or of JAX like those given.

    Args: passes: int32[B] or bool[B], of the target. drafted, accepted: bool[B, D], at which depths.
    """
    return stats._replace(
        target_passes=stats.target_passes + passes,
        drafted=stats.drafted + drafted.sum(1, dtype=np.int32),
        accepted=stats.accepted + accepted.sum(1, dtype=np.int32),
        drafted_by_depth=stats.drafted_by_depth + drafted,
        accepted_by_depth=stats.accepted_by_depth + accepted,
    )
