"""Chimera: a layer over the target's features, in which trigrams of tokens stand in for those not there yet.

Zeng et al.: Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all Tokens
(2024), arXiv 2402.15758.

Rule: `specjax.models.heads.chimera`; head k reads the last feature and what the layer says of the trigram that ends
with the node. The authors draft EAGLE-1's static tree.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q).
Deviations: the accepted tokens are read with true features at the start of the next draft, in one pass.
"""

from __future__ import annotations

from specjax.drafters.heads.medusa import medusa
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def chimera(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of as many tokens as there are heads, or of `num_tokens`, or a `tree`. Args: as `eagle`.

    State: keys and values of the layer for the text, the last feature, one accepted path of features.
    """
    return medusa(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
