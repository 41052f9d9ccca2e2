"""The budget of DSpark's scheduler for a batch, chosen before each step from the confidences of past steps.

DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation (DeepSeek 2026),
github.com/deepseek-ai/DeepSpec.

Rule: c_{r,j} is the trained confidence in the j-th drafted token of row r. Moving averages of it replace the acceptance
rates of `goodput`: choose the depth d with the most expected tokens, the sum over rows of 1 + sum over j <= d of
c_{r,1} ... c_{r,j}, per cost of the step. The budget of the next step is d tokens in each row.
Sequential temperature scaling calibrates the confidences while the text is written: c_j = sigmoid(z_j / T_j). From left
to right, T_j minimises the calibration error of c_1 ... c_j as a prediction that the first j tokens are all accepted.
Guarantee: that of the verifier. The depth is a function of earlier steps, so it depends on no token of the draft that
it limits. A search over all depths with the confidences of the same draft would bias the text.
Deviations: in the paper a budget of K tokens goes to the K largest products of confidences of a packed batch. Rows of
this engine are padded to one width, so each row has an equal share, at no higher cost. The paper fits temperatures
offline (`specjax.training` does so, too). Here decayed sums of errors for a grid of temperatures are updated in every
step. A sum contains predictions with earlier temperatures of the positions before it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import costs as cost_curves
from specjax.controllers.goodput import Evidence, by_costs, has_ended
from specjax.errors import UsageError
from specjax.types import Array, Controller, Info

GRID = np.append(1.0, np.geomspace(0.25, 4.0, 16)).astype(np.float32)
"""Temperatures to choose from. The first one is that of a calibrated head."""
BINS = 10
MEMORY = 0.999
"""Weight of the earlier sums after each observed token."""
PRIOR = 2.0
"""Errors, in tokens, that a temperature of e or 1 / e must save before it replaces 1."""


class Scaling(NamedTuple):
    """Calibration errors of the confidences of K positions, and the temperatures with the smallest ones."""

    gaps: Array  # float32[K, temperatures, BINS], decayed sums of predicted minus accepted
    temperatures: Array  # float32[K]


@functools.cache
def budget(
    depths: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7),
    *,
    costs: cost_curves.Costs = None,
    dtype: cost_curves.WeightDtype = "float32",
    draft_cost: float = 0.0,
    shares: cost_curves.Shares = cost_curves.NO_SHARES,
    start: float = 0.7,
    smoothing: float = 0.2,
    own_after: int = 2,
    probe_share: float = 0.01,
    margin: float = 1.03,
    scales: bool = True,
) -> Controller:
    """Build a controller for a drafter of chains with a trained confidence, such as `dspark`.

    Args:
      scales: calibrate the confidences while decoding. False: use them as they are.
      The others are those of `goodput`, with confidences as observations.

    Raises: UsageError as `goodput`; in the first step also for a drafter without a confidence or chains.
    """
    return by_costs(
        SCALED if scales else UNSCALED, depths, costs=costs, dtype=dtype, draft_cost=draft_cost, shares=shares,
        start=start, smoothing=smoothing, own_after=own_after, probe_share=probe_share, margin=margin, widths=None,
    )  # fmt: skip


def init_scaling(size: int) -> Scaling:
    """Return the scaling of `size` positions without any observation."""
    return Scaling(jnp.zeros((size, len(GRID), BINS)), jnp.ones(size))


def scale(scaling: Scaling, confidence: Array) -> Array:
    """Return the calibrated confidences of float32[B, K]."""
    return _at_temperature(confidence, scaling.temperatures)


def update_scaling(scaling: Scaling, confidence: Array, accepted: Array, is_seen: Array) -> Scaling:
    """Return the scaling after a step.

    Args:
      confidence: float32[B, K], as the head returned it. accepted: int32[B], number of accepted tokens.
      is_seen: bool[B, K], drafted tokens whose acceptance was tested.
    """
    calibrated = scale(scaling, confidence)
    above = jnp.cumprod(jnp.concatenate([jnp.ones_like(calibrated[:, :1]), calibrated[:, :-1]], 1), 1)
    predicted = above[:, :, None] * _at_temperature(confidence[:, :, None], jnp.asarray(GRID))  # [B, K, temperatures]
    is_right = (jnp.arange(confidence.shape[1]) < accepted[:, None]).astype(jnp.float32)
    place = jnp.minimum((predicted * BINS).astype(jnp.int32), BINS - 1)
    gap = jnp.where(is_seen[:, :, None], predicted - is_right[:, :, None], 0.0)
    sums = jnp.sum(jnp.where(place[..., None] == jnp.arange(BINS), gap[..., None], 0.0), 0)
    count = jnp.sum(is_seen, 0).astype(jnp.float32)
    gaps = scaling.gaps * (MEMORY**count)[:, None, None] + sums
    error = jnp.sum(jnp.abs(gaps), 2) + PRIOR * jnp.abs(jnp.log(jnp.asarray(GRID)))
    return Scaling(gaps, jnp.asarray(GRID)[jnp.argmin(error, 1)])


def _at_temperature(confidence: Array, temperature: Array) -> Array:
    chance = jnp.clip(confidence, 1e-6, 1 - 1e-6)
    return jax.nn.sigmoid((jnp.log(chance) - jnp.log1p(-chance)) / temperature)


def _observe(state: Scaling | tuple[()], info: Info, size: int) -> tuple[Array, Array, Scaling | tuple[()]]:
    """Observe the confidences of all drafted tokens. The outcomes of those that the text reached calibrate them."""
    if info.confidence is None:
        raise UsageError("the controller budget reads confidences, which this loop does not record; use goodput")
    confidence = info.confidence[:, :size]
    confidence = jnp.pad(confidence, ((0, 0), (0, size - confidence.shape[1])))
    place = jnp.arange(size)
    is_seen = (place < info.drafted_depth[:, None]) & info.active[:, None]
    if not isinstance(state, Scaling):
        return confidence, is_seen, state
    is_tried = is_seen & ((place < info.accepted[:, None]) | ~has_ended(info)[:, None])
    return scale(state, confidence), is_seen, update_scaling(state, confidence, info.accepted, is_tried)


SCALED = Evidence(init_scaling, _observe, reads_confidence=True)
UNSCALED = Evidence(lambda size: (), _observe, reads_confidence=True)
