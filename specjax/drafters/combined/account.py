"""The account of `auto`: what drafts gained so far, in plain passes. While it is overdrawn, decoding is plain.

Expected savings are estimates: acceptance rates are unknown at the start of a text, and a mixture of experts makes a
wide pass as dear as several plain ones. The account adds up what really happened. A draft, its head
and a wide pass are paid from it, the tokens of the pass are paid in, and each token adds a small allowance.

So `n` tokens lose at most OPENING + ALLOWANCE * n passes and the loss of one draft, if the costs of passes are right.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from specjax.drafters.widths import PassWidths, weight_of
from specjax.types import Array

OPENING = 4.0
"""Balance before the first draft, in plain passes.

With 1.5 a text whose drafts save a quarter of the time (three passes of 2.0 for a token that is right in 75 %) was
decoded plainly too often: 0.83 of the best width's speed instead of 0.88, and 0.93 without an account.
"""
ALLOWANCE = 0.01
"""Plain passes that each token adds to the balance."""
LARGEST = 6.0
"""Largest balance: gains long ago do not pay for losses now."""


def gain_of_pass(passes: PassWidths, width: int, num_tokens: Array, remaining: Array | None) -> Array:
    """Return the tokens float32[] of a pass per row beyond those that plain passes would have given in its time.

    Args:
      width: nodes of the pass, one of the compiled widths. num_tokens: int32[B], 0 in rows that have ended.
      remaining: as in `weight_of`: rows that are ahead of the slowest one count less.
    """
    weight = weight_of(remaining, num_tokens > 0)
    mean = jnp.sum(weight * num_tokens) / jnp.maximum(jnp.sum(weight), 1e-6)
    cost = jnp.asarray(passes.costs)[int(np.searchsorted(passes.widths, width))]
    return jnp.where(jnp.any(num_tokens > 0), mean - cost + ALLOWANCE * mean, 0.0)


def pay(balance: Array, amount: Array | float) -> Array:
    """Return the balance float32[] after a gain, or after a loss (a negative amount)."""
    return jnp.minimum(balance + amount, LARGEST)


def plain_steps(balance: Array) -> Array:
    """Return the plain steps int32[] until the account is no longer overdrawn."""
    return jnp.ceil(jnp.maximum(-balance, 0.0) / ALLOWANCE).astype(jnp.int32)
