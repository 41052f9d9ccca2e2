"""DSpark: a DFlash block whose slots are corrected by the token before them, and a head that knows how sure it is.

DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation (DeepSeek 2026),
github.com/deepseek-ai/DeepSpec.

Rule: logits_k + W2 W1 x_{k-1} (or gated by the slot's state, or a recurrence over the tokens drafted so far) is what
node k is drawn from (`specjax.models.heads.dflash`). The confidence of slot k is the chance that its token is
accepted: `trees.stops.own(P)` drafts nothing where it is below P, `trees.stops.acceptance(T, lag=False,
predict=trees.stops.own_confidence)` nothing behind the token with which their product falls below 1 - T.
Guarantee: distribution, as `dflash`; q has the correction. A confidence reads the tokens before a slot, never its own.
Deviations: as `dflash`. The scheduler of the paper, which shares a batch's budget among its rows, is not here.
"""

from __future__ import annotations

from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def dspark(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """As `dflash`; `stop` may be `trees.stops.own()` if the head has a confidence head. Args and state: as `dflash`."""
    return chain_of(head, num_tokens, tree, stop, keep_logits, longest)
