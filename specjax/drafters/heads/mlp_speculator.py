"""The MLP speculator: an MLP per depth takes the sampled token into a state that began as the target's last feature.

Wertheimer et al.: Accelerating Production LLMs with Combined Token/Embedding Speculators (2024), arXiv 2404.19124.

Rule: `specjax.models.heads.mlp_speculator`; what is drafted at a depth is said by the head of that depth, from the
state that has taken in the tokens above.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q).
Deviations: the authors draft several chains that share no node; here `trees.beam` or any other tree.
"""

from __future__ import annotations

from specjax.drafters.heads.medusa import medusa
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def mlp_speculator(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of as many tokens as there are heads, or of `num_tokens`, or a `tree`. Args: as `eagle`.

    State: one feature per row.
    """
    return medusa(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
