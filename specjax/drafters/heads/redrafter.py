"""ReDrafter: a small recurrent network over the drafted tokens, beside the target's last feature.

Cheng et al.: Recurrent Drafter for Fast Speculative Decoding in Large Language Models (2024), arXiv 2403.09919.

Rule: `specjax.models.heads.redrafter`; the state begins at nothing in every round. The authors draft by beam search,
`trees.beam(10, 4)`: beams that share a prefix share its nodes there, which is their dynamic tree attention.
Guarantee: distribution (greedy beams are a point mass; those that were drawn are verified with their q).
Deviations: the tree keeps what a later level of the beam search dropped, 1 + M D nodes, of which the authors keep the
prefixes of the last M beams. q is all of the head's distribution, not its 50 likeliest tokens.
"""

from __future__ import annotations

from specjax.drafters.heads.eagle import eagle
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def redrafter(
    head: DraftHead,
    num_tokens: int = 5,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens, or a `tree`. Args: as `eagle`.

    State: one feature per row.
    """
    return eagle(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
