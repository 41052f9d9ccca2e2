"""DFlash: one pass over a block of masks behind the text drafts all of its tokens.

DFlash: Block Diffusion for Flash Speculative Decoding (2026), arXiv 2602.06036.

Rule: the k-th slot of the block says the k-th token (`specjax.models.heads.dflash`), whatever is drafted before it; at
one depth all nodes have the same distribution. One pass per round, however deep the tree.
Guarantee: distribution. q of a chain is softmax(logits), warped as the target's, and the chain is verified with it; a
tree of likeliest tokens is a point mass.
Deviations: the block is always whole, as it was trained, near the end of a text too. An embedding of the target's is
scaled as the target scales it, times `embedding_scale`.
"""

from __future__ import annotations

from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def dflash(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of all tokens of the block, or of `num_tokens`, or a `tree` from `specjax.trees`.

    Args: as `eagle`.

    State: keys and values of the head's layers for the text, and one accepted path of features.
    """
    return chain_of(head, num_tokens, tree, stop, keep_logits, longest)
