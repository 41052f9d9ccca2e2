"""Medusa: several heads on the target's last feature say the next tokens at once; a static tree joins their ranks.

Cai, Li, Geng, Peng, Lee, Chen, Dao: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads
(ICML 2024), arXiv 2401.10774.

Rule: head k says the token k + 1 places behind the feature (`specjax.models.heads.medusa`); node (i_1, ..., i_j) of the
tree is the i_j-th likeliest token of head j. One product per head and round.
Guarantee: distribution (a point-mass tree). The paper's typical acceptance is `verifiers.typical`, lossy.
"""

from __future__ import annotations

from specjax.drafters.heads.learned import chain_of
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def medusa(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of as many tokens as there are heads, or of `num_tokens`, or a `tree` from `specjax.trees`.

    Args: as `eagle`; `trees.medusa()` is the authors' tree.

    State: one feature per row.
    """
    return chain_of(head, num_tokens, tree, stop, keep_logits, longest)
