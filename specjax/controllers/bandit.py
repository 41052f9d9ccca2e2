"""A deterministic multi-armed bandit that learns the reward of each arm.

Auer, Cesa-Bianchi, Fischer: Finite-time Analysis of the Multiarmed Bandit Problem (2002), UCB1. Rewards are discounted
as in Garivier, Moulines: On Upper-Confidence Bound Policies for Non-Stationary Bandit Problems (2008), arXiv 0805.3415,
because the statistics of a text change.

Rule: pull the arm with the largest mean + width * sqrt(log(pulls of all arms) / pulls of the arm). The weight of a pull
is multiplied by `memory` at each later pull. Arms that were never pulled come first, in order. Rewards are divided by
the largest mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array


class Arms(NamedTuple):
    """Discounted counts of K arms."""

    pulls: Array  # float32[K]
    rewards: Array  # float32[K], discounted sums of rewards


class Bandit(NamedTuple):
    """Pure functions over `Arms`."""

    init: Callable[[], Arms]
    choose: Callable[[Arms], Array]  # int32[]
    update: Callable[[Arms, Array, Array], Arms]  # (arms, arm int32[], reward float32[])


@functools.cache
def ucb(num_arms: int, *, width: float = 0.1, memory: float = 0.995) -> Bandit:
    """Build a bandit of `num_arms`. A larger `width` explores more, and a smaller `memory` forgets faster.

    tests/controllers/test_bandit.py measures its regret in simulation.

    Raises: UsageError for a setting outside its range.
    """
    if num_arms < 1 or width < 0 or not 0 < memory <= 1:
        raise UsageError(f"a bandit needs arms, width >= 0 and memory in (0, 1], not {num_arms}, {width}, {memory}")

    def choose(arms: Arms) -> Array:
        mean = arms.rewards / jnp.maximum(arms.pulls, 1e-6)
        scale = jnp.maximum(jnp.max(mean), 1e-6)
        total = jnp.maximum(jnp.sum(arms.pulls), 1.0)
        bound = mean / scale + width * jnp.sqrt(jnp.log(total) / jnp.maximum(arms.pulls, 1e-6))
        return jnp.argmax(jnp.where(arms.pulls > 0, bound, jnp.inf)).astype(jnp.int32)

    def update(arms: Arms, arm: Array, reward: Array) -> Arms:
        pulled = jnp.arange(num_arms) == arm
        return Arms(arms.pulls * memory + pulled, arms.rewards * memory + pulled * reward)

    return Bandit(lambda: Arms(jnp.zeros(num_arms), jnp.zeros(num_arms)), choose, update)
