"""When `auto` asks its head: where that lately saved more than drafting with it costs, and seldom elsewhere.

Rule: what its nodes added to the plain passes saved, beyond what it costs, is averaged by how much the other drafts
promised to save; where these copy well, a head adds little. It is asked where the average is above nothing, as it is at
first where the others promise little. Elsewhere it is asked once in a while, after pauses that double where that did
not pay either and halve where it did, until so seldom that a head that never helps costs a hundredth of plain decoding.

What a round adds varies as much as its mean. Where single rounds that did not pay doubled the pauses, and the average
had to climb from nothing, the shipped head in bfloat16 was asked in 64 % of the rounds of Spec-Bench's chat, where
asking always saves 0.24 passes a round and this 0.24, that 0.17.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.drafters.combined.node_classes import class_of
from specjax.drafters.combined.widths import MARGIN
from specjax.types import Array

PROMISES = (0.0, 0.05, 0.5, 1.5)
"""Lower bounds of the classes of what the other drafts promise to save, in passes of width 1."""
PROBES = 0.01
"""What asking it where it does not pay may cost, in passes of width 1 per round."""
HOPE, HOPED = (0.1, 0.1, -0.1, -0.1), 4
"""By class, what it is taken to save beyond its cost before it was asked, and as how many rounds that counts."""
YOUNG, MOST = 16, 0.35
"""So many rounds of a class, those of hope among them, count no more than so many passes beyond the cost, or than they
could lose: a head that is sure and wrong promises more until the classes of its nodes are learnt."""
FAST, SLOW = 1 / 6, 1 / 32
"""Weight of a round, at least, of these and of those after."""


class Asking(NamedTuple):
    """What all rows share."""

    worth: Array  # float32[PROMISES], passes of width 1 that its nodes saved beyond their cost
    rounds: Array  # int32[PROMISES], of which that is the mean
    pause: Array  # int32[], rounds between two questions where it does not pay
    wait: Array  # int32[], how many of them are left


def begin() -> Asking:
    """Of a head that was not asked yet."""
    rounds = jnp.full(len(PROMISES), HOPED, jnp.int32)
    return Asking(jnp.array(HOPE, jnp.float32), rounds, jnp.int32(0), jnp.int32(0))


def pays(asking: Asking, saved: Array) -> Array:
    """bool[]: whether it did so far where the other drafts promise to save so much, float32[]."""
    return asking.worth[class_of(saved, PROMISES)] > 0


def is_due(asking: Asking, saved: Array) -> Array:
    """bool[]: whether to ask."""
    return (asking.wait == 0) | pays(asking, saved)


def learnt(asking: Asking, cost: float, saved: Array, more: Array, was_asked: Array) -> Asking:
    """After a round in which the other drafts promised to save `saved` and all together `more`, float32[] each."""
    kind, gain = class_of(saved, PROMISES), more - saved - MARGIN * cost
    rounds = asking.rounds.at[kind].add(was_asked.astype(jnp.int32))
    is_young = rounds[kind] <= YOUNG
    weight = jnp.where(is_young, jnp.maximum(1 / rounds[kind].astype(jnp.float32), FAST), SLOW)
    counted = jnp.where(is_young, jnp.minimum(gain, max(MOST, MARGIN * cost)), gain)
    worth = asking.worth.at[kind].add(jnp.where(was_asked, weight * (counted - asking.worth[kind]), 0.0))
    pays_now = worth[kind] > 0
    was_probe = was_asked & ~(pays_now & pays(asking, saved))
    longer = jnp.minimum(2 * asking.pause + 1, max(round(cost / PROBES), 1))
    tried = jnp.where(pays_now, 0, jnp.where(gain > 0, asking.pause // 2, longer))
    pause = jnp.where(was_probe, tried, asking.pause)
    return Asking(worth, rounds, pause, jnp.where(was_probe, pause, jnp.maximum(asking.wait - 1, 0)))
