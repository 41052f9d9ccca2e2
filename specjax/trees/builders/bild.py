"""BiLD's draft: the likeliest tokens in a row, as long as the drafter is sure.

Kim, Mangalam, Moon, Malik, Mahoney, Gholami, Keutzer: Speculative Decoding with Big Little Decoder (NeurIPS 2023),
arXiv 2302.07863.

Rule: draft argmax q while max q is not below the bound of fallback. For `verifiers.rollback`, which has the rest.
Guarantee: point mass. Whether there is a token depends on the distribution, not on what is drawn.
"""

from __future__ import annotations

from specjax.trees.builders.static import branching
from specjax.trees.contracts import Builder, with_stop
from specjax.trees.stops import fallback as below


def bild(num_tokens: int = 10, fallback: float = 0.6) -> Builder:
    """A chain of at most `num_tokens` tokens; the defaults are those of the official code.

    Raises: UsageError for no token or a negative bound.
    """
    return with_stop(branching((1,) * num_tokens, "point_mass"), below(fallback))
