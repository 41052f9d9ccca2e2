"""Repetition penalty: make what is in the text already, prompt included, less likely.

Keskar, McCann, Varshney, Xiong, Socher: CTRL: A Conditional Transformer Language Model for Controllable Generation
(2019), arXiv 1909.05858, section 4.1.

Rule: x / r where x > 0, x r elsewhere, of the logits x of tokens in the text; r > 1 makes them less likely.
Deviation: the paper divides logits of either sign; this is what its authors' and all other code does.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from specjax.numerics.validation import check_range
from specjax.processors.counts import by_count
from specjax.types import Array, Processor


def repetition(penalty: float | Array) -> Processor:
    """`penalty`: a number above 0, or one per row; 1 changes nothing. Raises: UsageError for another one."""
    check_range("the repetition penalty", penalty, lambda x: (x > 0) & np.isfinite(x), "above 0")
    return by_count(_change, penalty, prompt=True)


def _change(penalty: Array, count: Array, logit: Array) -> Array:
    return jnp.where(count > 0, jnp.where(logit > 0, logit / penalty, logit * penalty), logit)
