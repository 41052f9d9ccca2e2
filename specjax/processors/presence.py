"""Presence penalty: make what has been decoded already less likely, by one amount. As the OpenAI API has it.

Rule: x - a where the token is among those decoded; the prompt does not count.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from specjax.numerics.validation import check_range
from specjax.processors.counts import by_count
from specjax.types import Array, Processor


def presence(penalty: float | Array) -> Processor:
    """`penalty`: a number, or one per row; 0 changes nothing. Raises: UsageError for what is not finite."""
    check_range("the presence penalty", penalty, np.isfinite, "a number")
    return by_count(_change, penalty, prompt=False)


def _change(penalty: Array, count: Array, logit: Array) -> Array:
    return jnp.where(count > 0, logit - penalty, logit)
