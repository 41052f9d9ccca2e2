"""EAGLE-1, 2 and 3: a small decoder that continues the target's features, one pass of it per level of the tree.

Li, Wei, Zhang, Zhang: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (ICML 2024),
arXiv 2401.15077; EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (EMNLP 2024), arXiv 2406.16858;
EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test (2025), arXiv 2503.01840.

Rule: the state of a committed token is the target's feature of it, that of a drafted one what the head said of it
(`specjax.models.heads.eagle`, `eagle3`); EAGLE-1 drafts a static tree, EAGLE-2 and 3 that of the likeliest paths.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q).
Deviations: the accepted tokens are read with the features of the pass that verified them, at the start of the next
draft. An embedding of Gemma's is scaled as the target scales it.
"""

from __future__ import annotations

from specjax import trees
from specjax.drafters.heads.learned import learned
from specjax.models.heads.contract import DraftHead
from specjax.trees import Builder, Stop
from specjax.types import Drafter


def eagle(
    head: DraftHead,
    num_tokens: int = 5,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    longest: int | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens, or a `tree` from `specjax.trees`, by an EAGLE head of any generation.

    Args:
      tree: `trees.eagle2()` is that of EAGLE-2 and 3; `trees.static(EAGLE_PATHS)` that of EAGLE-1.
      stop: when to draft no further, one of `trees.stops`.
      keep_logits: hand the head's distributions on in greedy and coupled decoding too, to a controller that reads them.
      longest: tokens that a round may accept where its trees are fused with others; default: its own depth + 1.

    State: keys and values of the head's layers for the text, and one accepted path of features.
    """
    return learned(head, trees.builder_of(num_tokens, tree, stop, keep_logits), longest)
