"""Frequency penalty: make what has been decoded often less likely, by its count. As the OpenAI API has it.

Rule: x - a c, with the count c of the token among those decoded; the prompt does not count.
"""

from __future__ import annotations

import numpy as np

from specjax.numerics.validation import check_range
from specjax.processors.counts import by_count
from specjax.types import Array, Processor


def frequency(penalty: float | Array) -> Processor:
    """`penalty`: a number, or one per row; 0 changes nothing. Raises: UsageError for what is not finite."""
    check_range("the frequency penalty", penalty, np.isfinite, "a number")
    return by_count(_change, penalty, prompt=False)


def _change(penalty: Array, count: Array, logit: Array) -> Array:
    return logit - penalty * count
