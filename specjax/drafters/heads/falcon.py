"""Falcon: a decoder layer over blocks of k tokens continues the target's last features, one pass per k levels.

Gao, Xie, Xiang, Ji: Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive
Drafting and Custom-Designed Decoding Tree (AAAI 2025), arXiv 2412.12639.

Rule: what follows a node of depth d is said of the tokens of the whole blocks above, k each from the root on; those
of its own block do not count (`specjax.models.heads.falcon`). Any tree of tokens: where a path has filled a block, the
next is drafted for it, and the target verifies by ancestors as everywhere.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q, the
head's distribution below the blocks above).
Deviations: the authors' code runs the LSTM over the batch, which for one text is each pair for itself; so it is here.
Along the text it carries a state with `FalconConfig.carries`, for heads that were trained so: then it reads a prompt
token by token, and its weights as often. Trees are any of tokens, not the authors' of whole blocks. The first block is
always the last k pairs, and true features of accepted tokens are read at the start of the next draft. A text shorter
than k + 1 tokens drafts in part from nothing.
"""

from __future__ import annotations

from specjax.drafters.heads.eagle import eagle
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def falcon(
    head: DraftHead,
    num_tokens: int = 4,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens, best a multiple of k, or a `tree`. Args: as `eagle`.

    State: keys and values of the head's layer for the text, what it reads of the last k pairs, the LSTM's state, and
    one accepted path of features.
    """
    return eagle(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
