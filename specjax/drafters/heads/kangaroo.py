"""Kangaroo: the target's first layers and a small adapter draft; a token that is not sure ends the draft.

Liu et al.: Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (2024), arXiv 2404.18911.

Rule: `specjax.models.heads.kangaroo`; drafted tokens read the target's own cache and each other in its first layers,
and the adapter's in the adapter. The draft ends behind a token drawn where no probability was 0.6, or at 6 tokens.
Guarantee: distribution (verified with the q that was sampled; the authors decode greedily).
Deviations: the target's pass runs all layers on the drafted tokens, of which the authors keep what the first said, as
`early_exit`. The adapter reads the accepted tokens at the start of the next draft, from the target's taps.
"""

from __future__ import annotations

from specjax import trees
from specjax.drafters.heads.eagle import eagle
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def kangaroo(
    head: DraftHead,
    num_tokens: int = 6,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens, or a `tree`. Args: as `eagle`; stop: default
    `trees.stops.kangaroo()`; `trees.stops.confidence(0)` never stops.

    State: keys and values of the adapter for the text, one accepted path of streams.
    """
    stop = stop or trees.stops.kangaroo()
    return eagle(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
