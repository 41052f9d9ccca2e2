"""M2R2: a second, faster stream through the target's first layers drafts until its router is not sure.

Bhendawade, Najibi, Naik, Belousova: M2R2: Mixture of Multi-Rate Residuals for Efficient Transformer Inference (2025),
arXiv 2502.02040.

Rule: `specjax.models.heads.m2r2`. q(. | text) = softmax(head(norm(a_E))), a_E the fast stream behind layer E; it reads
the target's own keys and values, and drafted tokens leave theirs of the slow stream beside it. Nothing is drafted where
the router says that the fast stream names the target's token with less than 1/2. `specjax.adaptive.train_m2r2` trains
one.
Guarantee: distribution (verified with the q that was sampled).
Deviations: the equations are our own. Loading experts ahead of time (MoE) is left out. The target's pass runs all
layers on the drafted tokens, as for `early_exit`. A pass of the first layers has each token twice, which costs nothing
where they are bound by memory, and up to twice as much where they are not.
"""

from __future__ import annotations

from specjax import trees
from specjax.drafters.heads.eagle import eagle
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def m2r2(
    head: DraftHead,
    num_tokens: int = 6,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens, or a `tree`. Args: as `eagle`; stop: default `trees.stops.own(0.5)`, the router;
    `trees.stops.own(0)` never stops.

    State: none but what every head has.
    """
    stop = stop or trees.stops.own(0.5)
    return eagle(head, num_tokens, tree=tree, stop=stop, keep_logits=keep_logits, longest=longest)
