"""DEER: a small denoiser drafts a block in one pass, and each token is sampled independently.

Cheng et al.: DEER: Draft with Diffusion, Verify with Autoregressive Models (2025), arXiv 2512.15176.

Rule: the text is followed by `num_tokens` masks. One pass gives a distribution q_j for each mask, and token j is drawn
from q_j regardless of the drafted tokens before it. A wrong token therefore does not make later tokens wrong.
Guarantee: distribution. q_j equals q(x_j | x_<j), which the verifier needs, because the pass reads no drafted token.
Deviations: the published algorithm continues to test tokens after a rejected one, with target logits that depend on the
rejected token. Here the first rejection ends the step, as in all verifiers. The separator between text and draft, which
the paper trains with, is not inserted.
"""

from __future__ import annotations

from specjax.catalog import Method, shared
from specjax.diffusion.drafting import as_drafter
from specjax.diffusion.types import Denoiser
from specjax.types import Drafter

METHOD = Method(
    name="deer",
    kind="drafter",
    guarantee="distribution",
    summary="drafts a block in one pass of a diffusion model and samples each token independently",
    paper="Cheng et al. 2025, arXiv 2512.15176",
    needs=frozenset({"denoiser"}),
    options=(shared.num_tokens(32),),
    arguments=("draft",),
)


def deer(denoiser: Denoiser, *, num_tokens: int = 32) -> Drafter:
    """Return the drafter. num_tokens: drafted tokens per step.

    Raises: UsageError for less than one token.
    """
    return as_drafter(denoiser, width=num_tokens)
