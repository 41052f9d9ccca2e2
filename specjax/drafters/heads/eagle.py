"""EAGLE-1 and 2: a decoder layer continues the target's last features, one pass of it per level of the tree.

Li, Wei, Zhang, Zhang: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (ICML 2024),
arXiv 2401.15077; EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (EMNLP 2024), arXiv 2406.16858.
FSPAD's heads (Gui et al. 2024, arXiv 2408.15562) are EAGLE's with `sampler` and `split` in their config.

Rule: the state of a committed token is the target's feature of it, that of a drafted one what the head said of it
(`specjax.models.heads.eagle`). EAGLE-1 drafts a static tree of likeliest tokens, EAGLE-2 that of the likeliest paths.
Guarantee: distribution (a tree of likeliest tokens is a point mass; one that was drawn is verified with its q).
Deviations: the accepted tokens are read with true features at the start of the next draft, in one pass. An embedding
of the target's is scaled as the target scales it.
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
    """A chain of `num_tokens` tokens, or a `tree` from `specjax.trees` such as `trees.eagle2()`, that of EAGLE-2.

    Args:
      stop: when to draft no further, one of `trees.stops`.
      keep_logits: hand the head's distributions on in greedy and coupled decoding too, to a controller that reads them.
      longest: tokens that a round may accept where its trees are fused with others; default: its own depth + 1.

    State: keys and values of the head's layers for the text, and one accepted path of features.
    """
    return learned(head, trees.builder_of(num_tokens, tree, stop, keep_logits), longest)
