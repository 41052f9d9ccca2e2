"""DFlash 2: a DFlash block with convolutions in its layers, and a selector that joins its slots' candidates to a path.

DFlash 2 (z-lab 2026), github.com/z-lab/dflash.

Rule: of a slot's K likeliest tokens b, score(a, b) = logit(b) + <A[a] * P h, B[b]>, where a is the token before
(`specjax.models.heads.dflash`); a greedy walk takes the best, a sampled one draws from softmax(score).
Guarantee: distribution, as `dflash`; q is that of the walk, nothing outside of the K candidates.
Deviations: as `dflash`. top-k and top-p of the target's sampling warp the scores, too.
"""

from __future__ import annotations

from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def dflash2(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """As `dflash`. Args and state: as `dflash`."""
    return chain_of(head, num_tokens, tree, stop, keep_logits, longest)
