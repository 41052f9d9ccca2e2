"""Repetition penalty: tokens of the text, prompt included, become less likely.

Keskar, McCann, Varshney, Xiong, Socher: CTRL: A Conditional Transformer Language Model for Controllable Generation
(2019), arXiv 1909.05858, section 4.1.

Rule: x / r where x > 0, else x r, for logits x of tokens in the text. r > 1 makes them less likely.
Deviation: the paper divides logits of either sign. Its authors' code and all other code use the rule above.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from specjax.numerics.validation import check_range
from specjax.processors.penalties.counts import by_count
from specjax.types import Array, Processor


def repetition(penalty: float | Array) -> Processor:
    """Build the processor. `penalty` is a number above 0 or one per row; 1 has no effect.

    Raises: UsageError otherwise.
    """
    check_range("the repetition penalty", penalty, lambda x: (x > 0) & np.isfinite(x), "above 0")
    return by_count(_change, penalty, prompt=True)


def _change(penalty: Array, count: Array, logit: Array) -> Array:
    return jnp.where(count > 0, jnp.where(logit > 0, logit / penalty, logit * penalty), logit)
