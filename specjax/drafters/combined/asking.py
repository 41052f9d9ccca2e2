"""When `auto` asks its head: where that lately saved more than drafting with it costs, and seldom elsewhere.

Rule: what its nodes added to the plain passes saved is averaged by how much the other drafts promised to save; where
these copy well, a head adds little. It is asked where the average exceeds its cost. Elsewhere it is asked once in so
many rounds that this costs a hundredth of plain decoding, and again at once if it then paid.
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
    wait: Array  # int32[], rounds until it is asked where it did not pay


def begin() -> Asking:
    """Of a head that was not asked yet, and is at the next occasion."""
    return Asking(jnp.zeros(len(PROMISES)), jnp.int32(0))


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
    pause = jnp.where(gain > MARGIN * cost, 0, max(round(cost / PROBES), 1))
    return Asking(asking.worth.at[kind].add(step), jnp.where(was_probe, pause, jnp.maximum(asking.wait - 1, 0)))
