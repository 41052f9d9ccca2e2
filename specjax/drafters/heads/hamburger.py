"""HAMburger, verified: its micro-step decoder drafts until its stop head ends the segment.

Liu, Zhang: HAMburger: Accelerating LLM Inference via Token Smashing (2025), arXiv 2505.20438.

Rule: `specjax.models.heads.hamburger`. The target reads all tokens one by one, and its streams of the last one but the
root begin a segment of which the root is the first token; drafts are the others. Nothing is drafted where 1 - p_stop is
below 0.9. `specjax.decoders.hamburger` is the method without a verifier, whose base reads segments as one.
Guarantee: distribution (verified with the q that was sampled), of the target that reads tokens one by one.
Deviations: the authors decode the two parts apart; that what is drafted so is verified is a choice of our own.
"""

from __future__ import annotations

from specjax import trees
from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def hamburger(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of as many tokens as a segment has besides its first, or of `num_tokens`, or a `tree`. Args: as `eagle`;
    stop: default `trees.stops.own(0.9)`; `trees.stops.own(0)` never stops.

    State: the target's streams at the last token, and one accepted path of them.
    """
    return chain_of(head, num_tokens, tree, stop or trees.stops.own(0.9), keep_logits, longest)
