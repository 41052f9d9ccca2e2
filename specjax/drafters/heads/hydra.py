"""Hydra and Hydra++: several heads, each of which reads the target's last feature and the tokens drafted so far.

Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (2024), arXiv 2402.05109.

Rule: head k says what follows a node of depth k - 1 from the feature and the tokens from the root down to the node
(`specjax.models.heads.hydra`); Hydra++ reads what a decoder layer over the features says in place of the last. The
authors draft the tree of Medusa, `trees.medusa()`.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q, the
head's distribution below the drafted tokens). The paper's typical acceptance is `verifiers.typical`, lossy.
Deviations: the prefix layer reads the accepted tokens at the start of the next draft, in one pass.
"""

from __future__ import annotations

from specjax.drafters.heads.medusa import medusa
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def hydra(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of as many tokens as there are heads, or of `num_tokens`, or a `tree`. Args: as `eagle`.

    State: one feature per row; of Hydra++ keys and values of the prefix layer for the text, and one accepted path.
    """
    return medusa(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
