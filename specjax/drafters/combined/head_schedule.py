"""Schedule of the draft head in `auto`: the head runs while it recently saved more than it costs, and rarely otherwise.

Rule: the gain of a step is the number of plain passes that the head's nodes saved, minus the head's cost. Gains are
averaged per class of the savings expected from the other drafts, because a head adds little if these copy well. The
head runs while the average of the class is positive. It starts positive if the others are expected to save little.
Otherwise it runs only after pauses, as a probe. A pause doubles after an unsuccessful probe and halves after a
successful one. At its maximum a head that never helps costs 1 % of plain decoding.

The gain of a single step varies as much as its mean. In an earlier rule, single steps without gain doubled the pauses,
and the average started at zero. The shipped head in bfloat16 then ran in 64 % of the steps of Spec-Bench's chat task
and saved 0.17 passes per step; this rule saves 0.24, as much as running it always.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from specjax.drafters.combined.node_classes import class_of
from specjax.drafters.widths import MARGIN
from specjax.types import Array

PROMISES = (0.0, 0.05, 0.5, 1.5)
"""Lower bounds of the classes of savings expected from the other drafts, in passes of width 1."""
PROBES = 0.01
"""Maximum cost of probing without gain, in passes of width 1 per step."""
PRIOR, PRIOR_STEPS = (0.1, 0.1, -0.1, -0.1), 4
"""Prior gain per class, and the number of steps that the prior counts as."""
YOUNG, MOST = 16, 0.35
"""In the first YOUNG steps of a class, prior included, a gain counts at most MOST passes, or the head's cost.

A confident but wrong head has overestimated savings until the acceptance rates of its node classes are learned.
"""
FAST, SLOW = 1 / 6, 1 / 32
"""Minimum weight of a step: within the first YOUNG steps, and after them."""


class HeadSchedule(NamedTuple):
    """State of the schedule, shared by all rows."""

    worth: Array  # float32[PROMISES], mean gain of a step, in passes of width 1
    steps: Array  # int32[PROMISES], number of steps in the mean
    pause: Array  # int32[], steps between two probes
    wait: Array  # int32[], remaining steps of the pause


def init_schedule() -> HeadSchedule:
    """Return the schedule of a head that has not run yet."""
    rounds = jnp.full(len(PROMISES), PRIOR_STEPS, jnp.int32)
    return HeadSchedule(jnp.array(PRIOR, jnp.float32), rounds, jnp.int32(0), jnp.int32(0))


def is_profitable(schedule: HeadSchedule, saved: Array) -> Array:
    """Return bool[], true if the mean gain is positive for savings `saved` float32[] expected from the other drafts."""
    return schedule.worth[class_of(saved, PROMISES)] > 0


def is_due(schedule: HeadSchedule, saved: Array) -> Array:
    """Return bool[], true if the head should run in this step."""
    return (schedule.wait == 0) | is_profitable(schedule, saved)


def update_schedule(schedule: HeadSchedule, cost: float, saved: Array, more: Array, has_run: Array) -> HeadSchedule:
    """Update the schedule after a step.

    Args:
      cost: cost of the head's draft, in passes of width 1.
      saved, more: float32[], expected savings without and with the head's nodes.
      has_run: bool[], true if the head ran.
    """
    kind, gain = class_of(saved, PROMISES), more - saved - MARGIN * cost
    rounds = schedule.steps.at[kind].add(has_run.astype(jnp.int32))
    is_young = rounds[kind] <= YOUNG
    weight = jnp.where(is_young, jnp.maximum(1 / rounds[kind].astype(jnp.float32), FAST), SLOW)
    counted = jnp.where(is_young, jnp.minimum(gain, max(MOST, MARGIN * cost)), gain)
    worth = schedule.worth.at[kind].add(jnp.where(has_run, weight * (counted - schedule.worth[kind]), 0.0))
    is_good = worth[kind] > 0
    was_probe = has_run & ~(is_good & is_profitable(schedule, saved))
    longer = jnp.minimum(2 * schedule.pause + 1, max(round(cost / PROBES), 1))
    new_pause = jnp.where(is_good, 0, jnp.where(gain > 0, schedule.pause // 2, longer))
    pause = jnp.where(was_probe, new_pause, schedule.pause)
    return HeadSchedule(worth, rounds, pause, jnp.where(was_probe, pause, jnp.maximum(schedule.wait - 1, 0)))
