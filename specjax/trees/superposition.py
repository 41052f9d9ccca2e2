"""Growth of superposed drafts, shared by the drafter and the decoder of superposed decoding.

Shen, Fan, Pratt, Park, Wallingford, Kakade, Holtzman, Krishna, Farhadi, Kusupati: Superposed Decoding: Multiple
Generations from a Single Autoregressive Inference Pass (NeurIPS 2024), arXiv 2405.18400.
"""

from __future__ import annotations

import jax

from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array


def likeliest(logits: Array, candidates: int) -> tuple[Array, Array]:
    """Return the likeliest tokens int32[B, C] of logits [B, V], best first, and their log-probabilities.

    The log-probabilities are normalised over these C tokens.
    """
    tokens, scores = gumbel_topk(None, logits, candidates)
    return tokens, jax.nn.log_softmax(scores, -1)


def extend(scores: Array, log_r: Array, number: int | None = None) -> tuple[Array, Array, Array]:
    """Return the best `number` (default: k) sums of `scores` float32[B, k] and `log_r` float32[B, k, C].

    Returns: the index of the extended draft int32[B, number], that of its candidate int32[B, number], and the new
    scores
      float32[B, number].
    """
    total = scores[:, :, None] + log_r
    best, place = jax.lax.top_k(total.reshape(total.shape[0], -1), number or scores.shape[1])
    return place // total.shape[2], place % total.shape[2], best
