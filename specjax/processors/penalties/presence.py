"""Presence penalty as in the OpenAI API: decoded tokens become less likely by a constant.

Rule: x - a if the token is among the decoded tokens. The prompt does not count.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from specjax.numerics.validation import check_range
from specjax.processors.penalties.counts import by_count
from specjax.types import Array, Processor


def presence(penalty: float | Array) -> Processor:
    """Build the processor. `penalty` is a number or one per row; 0 has no effect.

    Raises: UsageError if it is not finite.
    """
    check_range("the presence penalty", penalty, np.isfinite, "a number")
    return by_count(_change, penalty, prompt=False)


def _change(penalty: Array, count: Array, logit: Array) -> Array:
    return jnp.where(count > 0, logit - penalty, logit)
