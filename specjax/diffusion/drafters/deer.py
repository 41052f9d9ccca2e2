"""DEER: a block in one pass of a small denoiser, each token drawn by itself.

Cheng et al.: DEER: Draft with Diffusion, Verify with Autoregressive Models (2025), arXiv 2512.15176.

Rule: the text is followed by `num_tokens` masks; one pass gives a row q_j for each, and the token j is drawn from it,
whatever those before it are. So what is wrong with one does not make the next ones wrong.
Guarantee: distribution. The rows are the law q(x_j | x_<j) that the verifier needs, as nothing of the draft was read.
Deviations: the printed algorithm goes on testing tokens behind a rejected one, whose target row was computed with it;
here the first rejection ends the round, as every verifier has it. The separator between text and draft that it is
trained with is not put there.
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
    """Return the drafter. num_tokens: of a block.

    Raises: UsageError for less than one.
    """
    return as_drafter(denoiser, width=num_tokens)
