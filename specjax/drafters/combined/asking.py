"""When `auto` asks its head: where that lately saved more than drafting with it costs, and seldom elsewhere.

Rule: what its nodes added to the plain passes saved is averaged by how much the other drafts promised to save; where
these copy well, a head adds little. It is asked where the average exceeds its cost. Elsewhere it is asked once in a
while: again at once if it paid, else after pauses that double, until so seldom that this costs a hundredth of plain
decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.drafters.combined.nodes import class_of
from specjax.drafters.combined.widths import MARGIN, RECENT
from specjax.types import Array

PROMISES = (0.0, 0.05, 0.5, 1.5)
"""Lower bounds of the classes of what the other drafts promise to save, in passes of width 1."""
PROBES = 0.01
"""What asking it where it does not pay may cost, in passes of width 1 per round."""


class Asking(NamedTuple):
    """What all rows share."""

    worth: Array  # float32[PROMISES], passes of width 1 that its nodes saved of late
    pause: Array  # int32[], rounds between two questions where it does not pay
    wait: Array  # int32[], how many of them are left


def begin() -> Asking:
    """Of a head that was not asked yet, and is at the next occasion."""
    return Asking(jnp.zeros(len(PROMISES)), jnp.int32(0), jnp.int32(0))


def pays(asking: Asking, cost: float, saved: Array) -> Array:
    """bool[]: whether it lately did where the other drafts promise to save so much, float32[]."""
    return asking.worth[class_of(saved, PROMISES)] > MARGIN * cost


def is_due(asking: Asking, cost: float, saved: Array) -> Array:
    """bool[]: whether to ask."""
    return (asking.wait == 0) | pays(asking, cost, saved)


def learnt(asking: Asking, cost: float, saved: Array, more: Array, was_asked: Array) -> Asking:
    """After a round in which the other drafts promised to save `saved` and all together `more`, float32[] each."""
    kind, gain = class_of(saved, PROMISES), more - saved
    step = jnp.where(was_asked, RECENT * (gain - asking.worth[kind]), 0.0)
    was_probe = was_asked & ~pays(asking, cost, saved)
    longer = jnp.minimum(2 * asking.pause + 1, max(round(cost / PROBES), 1))
    pause = jnp.where(was_probe, jnp.where(gain > MARGIN * cost, 0, longer), asking.pause)
    wait = jnp.where(was_probe, pause, jnp.maximum(asking.wait - 1, 0))
    return Asking(asking.worth.at[kind].add(step), pause, wait)
