"""Widths of the target pass: those that can pay for a batch, and the best one for a draft.

A width can pay if its best draft has more expected tokens per cost than plain decoding and than every narrower width,
and if the logits of its pass fit LOGITS_BYTES. The others are not compiled, because a program reserves the memory of
its widest pass whether that pass runs or not: 4.2 GiB for 64 rows of 64 nodes with 262,144 tokens. Without processors
a model on one device computes its likeliest tokens by blocks (`Model.best`) and does not store logits of that size.
The place of the other widths is taken by NARROW ones that can pay. If none can, `auto` decodes plainly.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import costs as costs_of
from specjax.costs.sharing import ExpertSharing, corrected_costs
from specjax.types import Array, Target

MARGIN = 1.1
"""Factor by which a wide pass must beat plain decoding: estimates are noisy, and losses matter more than gains."""
RECENT = 0.125
"""Weight of the last draft in the moving average of the expected savings."""
LEAD = 4.0
"""Number of tokens ahead of the slowest row that divides the weight of a row by e."""

CPU_WIDTHS = (1, 4, 8, 16)
WIDTHS = (1, 16, 32, 64)
"""Widths for accelerators, which read the weights once for dozens of tokens; narrow passes are hardly cheaper there."""

CERTAIN = 0.95
"""Acceptance rate of a token in the best draft: a copy of a long repeated passage."""
LOGITS_BYTES = 1 << 30
"""Maximum size of the float32 logits of a pass on one device."""
NARROW = (4, 8)
"""Widths that replace those that are too wide for a batch."""
PAIR = 2
"""A further one on CPUs, whose products take longer with each token of a batch.

A pass over 2 tokens of 4 rows of SmolLM2 cost 1.17 plain passes on two cores, and one over 4 tokens 1.38."""


class PassWidths(NamedTuple):
    """The widths of the target pass for a batch, and their costs."""

    widths: tuple[int, ...]  # rising from 1
    costs: np.ndarray | Array  # float32[W], in passes of width 1
    added: np.ndarray | None = None  # float32[W], parts of the costs that further experts of a mixture add

    def with_sharing(self, sharing: ExpertSharing | tuple[()]) -> PassWidths:
        """Return the passes with costs for the experts that they really read; (): those of independent rows."""
        if self.added is None or not isinstance(sharing, ExpertSharing):
            return self
        return self._replace(costs=corrected_costs(self.costs, self.added, self.widths, sharing))

    @property
    def is_plain(self) -> bool:
        """Return True if no width above 1 can pay."""
        return len(self.widths) == 1


def default_widths(platform: str | None) -> tuple[int, ...]:
    """Return the widths of the target pass to choose from, on a platform or chip; None: this device."""
    return CPU_WIDTHS if (platform or jax.default_backend()) == "cpu" else WIDTHS


def select_passes(
    widths: tuple[int, ...], costs: costs_of.Costs, batch: int, vocab_size: int, dtype: costs_of.WeightDtype,
    platform: str | None, target: Target | None,
) -> PassWidths:  # fmt: skip
    """Return the passes that can pay for `batch` rows.

    Args:
      widths: the default widths, rising from 1. costs, dtype, platform: as in `auto`.
      target: for the shares of its logits and states, and its mesh, which may split rows and the vocabulary.
        None: one device.
    """
    mesh = None if target is None else target.model.mesh
    devices, data = (1, 1) if mesh is None else (mesh.size, dict(mesh.shape).get("data", 1))
    rows = -(-batch // data)
    shares = costs_of.NO_SHARES if target is None else costs_of.shares_of(target, platform)
    max_width = LOGITS_BYTES * devices / data / (4 * rows * vocab_size)
    evaluate = lambda widths: costs_of.evaluate(costs, widths, rows, dtype, platform, shares)
    with_parts = lambda passes: passes._replace(
        added=costs_of.added_by_experts(costs, passes.widths, rows, dtype, platform, shares)
    )
    passes = _paying(widths, max_width, evaluate(widths))
    # A tuple of numbers has costs for the default widths only, but a curve, also a tuple, has those of any width.
    if len(passes.widths) == len(widths) or (costs and not isinstance(costs, costs_of.Curve)):
        return with_parts(passes)
    narrow = (PAIR, *NARROW) if (platform or jax.default_backend()) == "cpu" else NARROW
    more = tuple(sorted({*widths, *narrow}))
    return with_parts(_paying(more, max_width, evaluate(more)))


def _paying(widths: tuple[int, ...], max_width: float, pass_costs: np.ndarray) -> PassWidths:
    """Return those of `widths` up to `max_width` whose best draft has the most tokens per cost so far."""
    tokens = (1 - CERTAIN ** np.asarray(widths)) / (1 - CERTAIN)
    paying, best = [0], MARGIN
    for place in range(1, len(widths)):
        goodput = tokens[place] / pass_costs[place]
        if goodput > best and widths[place] <= max_width:
            paying, best = [*paying, place], goodput
    return PassWidths(tuple(widths[place] for place in paying), pass_costs[np.asarray(paying)])


def weight_of(remaining: Array | None, running: Array) -> Array:
    """Return float32[B], the weight of a token in a row with `remaining` int32[B] tokens to decode.

    It is 1 in the slowest row and 0 in finished rows. Without `remaining` all running rows have weight 1.

    Without these weights four rows of SmolLM2 took 5 % longer than plain decoding on two of six tasks. `serve` uses
    equal weights: with these, thirty predictable short requests next to a long one took 480 steps instead of 138.
    """
    if remaining is None:
        return running.astype(jnp.float32)
    slowest = jnp.max(jnp.where(running, remaining, 0))
    return jnp.where(running, jnp.exp((remaining - slowest) / LEAD), 0.0)


def best_width(widths: tuple[int, ...], costs: np.ndarray | Array, chance: Array, weight: Array) -> tuple[Array, Array]:
    """Return the width int32[] with the most expected tokens per cost, and the plain passes float32[] it should save.

    Args:
      costs: float32[W], costs of the passes, in passes of width 1.
      chance: float32[B, M], acceptance probabilities of the nodes, falling.
      weight: float32[B], weight of a token of each row.
    """
    total = jnp.cumsum(chance, 1)  # [B, M], sums over the first nodes, without the root
    tokens = jnp.sum(weight[:, None] * (1 + total[:, np.asarray(widths) - 1]), 0)  # [W]
    goodput = tokens / jnp.asarray(costs)
    best = jnp.argmax(goodput.at[0].multiply(MARGIN))
    saved = tokens[best] / jnp.maximum(tokens[0], 1e-6) - jnp.asarray(costs)[best]
    return jnp.asarray(widths)[best], jnp.where(best > 0, saved, 0.0)
