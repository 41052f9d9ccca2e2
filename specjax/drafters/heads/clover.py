"""Clover and Clover-2: layers that have read the root, and behind them a recurrent chain that reads what is drafted.

Xiao et al.: Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge (2024), arXiv 2405.00263;
Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding (2024), arXiv 2408.00264.

Rule: `specjax.models.heads.clover`; the layers read each accepted token once, with the target's stream before its final
norm, and drafted ones pass only a gate. Clover-2's authors draft EAGLE-1's static tree.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q).
Deviations: any tree of `specjax.trees` in place of Clover's own, which keeps the likeliest tokens of a node up to a
mass of 0.95. Clover (without 2), whose code was not published, as its module says.
"""

from __future__ import annotations

from specjax.drafters.heads.eagle import eagle
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def clover(
    head: DraftHead,
    num_tokens: int = 5,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens, or a `tree`. Args: as `eagle`.

    State: keys and values of the layers for the text, what they said of the last pair, one accepted path of features.
    """
    return eagle(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
