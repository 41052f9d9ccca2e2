"""P-EAGLE: an EAGLE-3 head that drafts all depths in one pass.

P-EAGLE: Parallel-Drafting EAGLE with Scalable Training (2026), arXiv 2602.01469.

Rule: behind the pairs of the text it reads pairs of a mask token and a learned state, one a depth
(`specjax.models.heads.p_eagle`); at one depth all nodes have the same distribution.
Guarantee: distribution, as `dflash`. Tokens outside of the head's vocabulary are never drafted.
Deviations: as `eagle`. All depths that were trained are computed, however many are drafted.
"""

from __future__ import annotations

from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def p_eagle(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of as many tokens as the head has depths, or of `num_tokens`, or a `tree`. Args and state: as `eagle`."""
    return chain_of(head, num_tokens, tree, stop, keep_logits, longest)
