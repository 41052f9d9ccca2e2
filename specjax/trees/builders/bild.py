"""BiLD's draft: a chain of likeliest tokens that ends where the drafter is not confident.

Kim, Mangalam, Moon, Malik, Mahoney, Gholami, Keutzer: Speculative Decoding with Big Little Decoder (NeurIPS 2023),
arXiv 2302.07863.

Rule: draft argmax q while max q is not below the fallback threshold. `verifiers.rollback` implements the acceptance.
Guarantee: point mass. The decision to draft a token depends on the distribution, not on the drawn token.
"""

from __future__ import annotations

from specjax.trees.builders.static import branching
from specjax.trees.contracts import Builder, with_stop
from specjax.trees.stops import fallback as fallback_rule


def bild(num_tokens: int = 10, fallback: float = 0.6) -> Builder:
    """Return a builder of a chain of at most `num_tokens` tokens. The defaults are those of the official code.

    Raises: UsageError for num_tokens below 1 or a negative threshold.
    """
    return with_stop(branching((1,) * num_tokens, "point_mass"), fallback_rule(fallback))
