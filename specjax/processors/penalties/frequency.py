"""Frequency penalty as in the OpenAI API: tokens become less likely in proportion to their count.

Rule: x - a c, where c is the count of the token among the decoded tokens. The prompt does not count.
"""

from __future__ import annotations

import numpy as np

from specjax.numerics.validation import check_range
from specjax.processors.penalties.counts import by_count
from specjax.types import Array, Processor


def frequency(penalty: float | Array) -> Processor:
    """Build the processor. `penalty` is a number or one per row; 0 has no effect.

    Raises: UsageError if it is not finite.
    """
    check_range("the frequency penalty", penalty, np.isfinite, "a number")
    return by_count(_change, penalty, prompt=False)


def _change(penalty: Array, count: Array, logit: Array) -> Array:
    return logit - penalty * count
