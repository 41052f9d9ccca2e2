"""Domino: a DFlash block whose slots are corrected by a recurrence over the tokens drafted before them.

Domino (2026), arXiv 2605.29707.

Rule: s = GRU over the embeddings of the root and the tokens above a slot; logits + W SiLU(V [h; s]), but for the first
slot, which stays as DFlash says it (`specjax.models.heads.dflash`).
Guarantee: distribution, as `dflash`; q has the correction.
Deviations: as `dflash`.
"""

from __future__ import annotations

from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def domino(
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
