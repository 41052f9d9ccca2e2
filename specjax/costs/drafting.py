"""Cost of drafting without a model, in target passes over one token.

Tables and copies cost a fixed time per step. For a model of usual size it is a few percent of a pass, and for a tiny
model several passes. Then drafts pay only in texts that repeat themselves.
"""

from __future__ import annotations

import math

from specjax.costs.accelerators import current_chip
from specjax.costs.experts import active_bytes
from specjax.types import Target

LONG_SHARE = 0.25
"""Bytes of the cache of all rows, relative to those of the weights, from which drafts over a part of the cache pay.

A draft pass reads W + B b k bytes and the target's pass W + B S k, with W bytes of weights, k bytes per cached token, B
rows, and b of S tokens selected. Three drafts with an acceptance rate of 0.85 pay from about B S k = W / 4 on.
"""

SECONDS = 0.3e-3
"""Seconds of a draft of `auto` for one row on CPU.

They are 0.3 ms for the tiny mixture of the tests on two cores with AVX-512, and 0.5 ms for SmolLM2 on two cores
(float32, jax 0.10).
"""
BANDWIDTH = 17e9
"""Bytes of weights per second of a pass over one token on CPU: 538 MB of SmolLM2 take 31 ms on two cores."""
LAYER_SECONDS = 15e-6
"""Seconds of the small operations of a layer. A pass of the tiny mixture (4 layers, 1 MB) takes 0.13 ms."""
ELSEWHERE = 0.04
"""Cost on accelerators: that of Llama 3 8B on 8 v5e chips. Their time for a tiny model was not measured."""


def long_context(weights: float, per_token: float) -> int:
    """Return the cached tokens of a row from which drafts over a small part of the cache pay.

    Args:
      weights: bytes of the weights. per_token: bytes of a cached token of all rows.
    """
    return math.ceil(LONG_SHARE * weights / per_token)


def of_drafting(target: Target, platform: str | None = None) -> float:
    """Estimate the cost of a draft of `auto` without a head for one row, by a rule of thumb. Without layers it is 0.

    Args:
      platform: as in `estimated`.
    """
    if (platform or current_chip()) != "cpu":
        return ELSEWHERE
    if not target.model.capabilities.num_layers:  # a toy model of the tests
        return 0.0
    return SECONDS / (active_bytes(target) / BANDWIDTH + target.model.capabilities.num_layers * LAYER_SECONDS)
