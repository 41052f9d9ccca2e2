"""The likeliest tokens of an output head by blocks of its vocabulary, without an array of all logits.

The float32 logits of 64 rows with 16 tokens and a vocabulary of 262,144 take 1 GiB. A block takes at most BLOCK_BYTES.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.numerics.quantized_array import QuantizedArray
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array, Best

BLOCK_BYTES = 1 << 26
"""Maximum size of the float32 logits of a block."""
ALIGNMENT, MIN_BLOCK = 512, 2048
"""Divisor and minimum of the tokens of a block."""


def best_by_blocks(
    logits_of: Callable[[Any], Array], table: Array | QuantizedArray, shape: tuple[int, ...], k: int
) -> Best:
    """Return the `k` likeliest tokens of each of `shape` states, best first. Of equal logits, lower ids are first.

    Args:
      logits_of: returns the logits float32[*shape, n] of n rows of the `table` [V, D].
    """
    vocab = len(table)
    size = min(max(BLOCK_BYTES // (4 * math.prod(shape)) // ALIGNMENT * ALIGNMENT, MIN_BLOCK, k), vocab)

    def body(number: Array, best: Best) -> Best:
        start = jnp.minimum(number * size, vocab - size)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), table)
        logits = logits_of(rows)
        logits = jnp.where(ids >= number * size, logits, -jnp.inf)  # the last block overlaps the one before
        return _merge(best, _best_of(logits, start, k))

    empty = Best(jnp.zeros((*shape, k), jnp.int32), *(jnp.full((*shape, *n), -jnp.inf) for n in ((k,), ())))
    return jax.lax.fori_loop(0, -(-vocab // size), body, empty)


def _best_of(logits: Array, start: Array, k: int) -> Best:
    """Return the best of a block of logits [..., n], whose first token is `start` int32[]."""
    logits = jax.lax.optimization_barrier(logits)
    ids, scores = jax.lax.optimization_barrier(gumbel_topk(None, logits, k))
    top = jnp.where(jnp.isfinite(scores[..., :1]), scores[..., :1], 0.0)
    total = jnp.log(jnp.sum(jnp.exp(logits - top), -1)) + top[..., 0]  # NaN if a logit is NaN
    return Best(ids + start, scores, total)


def _merge(best: Best, block: Best) -> Best:
    """Return the best of two parts of the vocabulary. Tokens of the first part have lower ids."""
    join = lambda x, y: jnp.concatenate([x, y], -1)
    scores, place = jax.lax.top_k(join(best.logits, block.logits), best.logits.shape[-1])
    tokens = take_along(join(best.tokens, block.tokens), place, -1)
    return Best(tokens, scores, jnp.logaddexp(best.total, block.total))
