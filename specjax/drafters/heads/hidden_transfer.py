"""Hidden Transfer: the target's own upper layers draft, from states that are transferred from its last token.

Wu, Liu, Gong, Wang, Li, Wang, Cai, Zhao: Parallel Decoding via Hidden Transfer for Lossless Large Language Model
Acceleration (2024), arXiv 2404.12022.

Rule: a matrix per draft makes its state of that of the last token, at some layer, and the layers above finish it
(`specjax.models.heads.hidden_transfer`); at one depth all nodes have the same distribution.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q).
Deviations: the authors carry the states of every candidate through the pass that verifies it and keep those of the
last that is accepted. Here those alone are computed, at the start of the next draft, to the same numbers: one pass of
the target's upper layers over as many states as there are drafts, in place of so many more slots for every node.
"""

from __future__ import annotations

from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def hidden_transfer(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of as many tokens as the head has matrices, or of `num_tokens`, or a `tree`. Args: as `eagle`.

    State: the target's streams at the last token, and one accepted path of them.
    """
    return chain_of(head, num_tokens, tree, stop, keep_logits, longest)
