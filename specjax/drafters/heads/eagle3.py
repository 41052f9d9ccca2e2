"""EAGLE-3 and 3.1: a decoder layer continues several of the target's streams, with a vocabulary and a head of its own.

Li, Wei, Zhang, Zhang: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test
(2025), arXiv 2503.01840.

Rule: the state of a committed token is fc of the target's streams behind three of its layers, that of a drafted one
what the head said of it (`specjax.models.heads.eagle3`). The authors draft `trees.eagle2()`.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q). Tokens
outside of the head's vocabulary are never drafted.
Deviations: as `eagle`.
"""

from __future__ import annotations

from specjax.drafters.heads.eagle import eagle
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def eagle3(
    head: DraftHead,
    num_tokens: int = 5,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens, or a `tree`. Args and state: as `eagle`."""
    return eagle(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
