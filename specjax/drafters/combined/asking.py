"""When `auto` asks its head: where that lately saved more than drafting with it costs, and seldom elsewhere.

Rule: what its nodes added to the plain passes saved, beyond what it costs, is averaged by how much the other drafts
promised to save; where these copy well, a head adds little. It is asked where the average is above nothing, as it is at
first where the others promise little. Elsewhere it is asked once in a while: again at once if it paid, else after
pauses that double, until so seldom that this costs a hundredth of plain decoding.

An average that begins with nothing has to climb over the cost while single rounds, which vary as much as their mean,
double the pauses: the shipped head in bfloat16 was asked in 64 % of the rounds of Spec-Bench's chat, where every round
pays in the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.drafters.combined.nodes import class_of
from specjax.drafters.combined.widths import MARGIN
from specjax.types import Array

PROMISES = (0.0, 0.05, 0.5, 1.5)
"""Lower bounds of the classes of what the other drafts promise to save, in passes of width 1."""
PROBES = 0.01
"""What asking it where it does not pay may cost, in passes of width 1 per round."""
HOPE, HOPED = (0.1, 0.1, -0.1, -0.1), 4
"""By class, what it is taken to save beyond its cost before it was asked, and as how many rounds that counts."""
LEAST = 1 / 6
"""Weight of a round, at least."""
MOST = 0.35
"""What a round counts beyond the cost, at most: a head that is sure and wrong promises more until its classes are
learnt."""


class Asking(NamedTuple):
    """What all rows share."""

    worth: Array  # float32[PROMISES], passes of width 1 that its nodes saved beyond their cost
    rounds: Array  # int32[PROMISES], of which that is the mean
    pause: Array  # int32[], rounds between two questions where it does not pay
    wait: Array  # int32[], how many of them are left


def begin() -> Asking:
    """Of a head that was not asked yet."""
    return Asking(jnp.array(HOPE), jnp.full(len(PROMISES), HOPED), jnp.int32(0), jnp.int32(0))


def pays(asking: Asking, saved: Array) -> Array:
    """bool[]: whether it did so far where the other drafts promise to save so much, float32[]."""
    return asking.worth[class_of(saved, PROMISES)] > 0


def is_due(asking: Asking, saved: Array) -> Array:
    """bool[]: whether to ask."""
    return (asking.wait == 0) | pays(asking, saved)


def learnt(asking: Asking, cost: float, saved: Array, more: Array, was_asked: Array) -> Asking:
    """After a round in which the other drafts promised to save `saved` and all together `more`, float32[] each."""
    kind, gain = class_of(saved, PROMISES), jnp.minimum(more - saved - MARGIN * cost, MOST)
    rounds = asking.rounds.at[kind].add(was_asked)
    weight = jnp.maximum(1 / rounds[kind].astype(jnp.float32), LEAST)
    step = jnp.where(was_asked, weight * (gain - asking.worth[kind]), 0.0)
    was_probe = was_asked & ~pays(asking, saved)
    longer = jnp.minimum(2 * asking.pause + 1, max(round(cost / PROBES), 1))
    pause = jnp.where(was_probe, jnp.where(gain > 0, 0, longer), asking.pause)
    wait = jnp.where(was_probe, pause, jnp.maximum(asking.wait - 1, 0))
    return Asking(asking.worth.at[kind].add(step), rounds, pause, wait)
