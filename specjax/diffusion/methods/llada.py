"""LLaDA's decoding: blocks from left to right, in each pass as many columns as its share, the surest first.

Nie et al.: Large Language Diffusion Models (2025), arXiv 2502.09992.

Rule: `specjax.diffusion.schedules.blocks` and `specjax.diffusion.rules.quota`.
Guarantee: definition. One column a pass (`steps=None`) is the reference for the quality of everything faster.
Deviations: noise is log-form Gumbel noise in float32 (the release has the ratio form in float64); the mask token is
never proposed; a row ends when its text up to an eos is decided, which changes nothing of that text. The options that
forbid eos are not here (`eoser` decides ends late). Guidance: `specjax.diffusion.caches.guided`.
"""

from __future__ import annotations

from specjax.catalog import Method, Option, shared
from specjax.diffusion.caches import WHOLE, append, guided
from specjax.diffusion.rules.quota import By, quota
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Denoiser, Procedure
from specjax.diffusion.validation import checked

METHOD = Method(
    name="llada",
    kind="diffusion",
    guarantee="definition",
    summary="decides blocks from left to right, and in each pass a fixed number of the most confident columns",
    paper="Nie et al. 2025, arXiv 2502.09992",
    options=(
        shared.BLOCK,
        shared.STEPS,
        shared.RANKING,
        Option("guidance", "float", 0.0, "scale of classifier-free guidance, away from the logits without the prompt"),
    ),
)


@checked
def llada(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    steps: int | None = None,
    by: By = "confidence",
    guidance: float = 0.0,
) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. steps: passes for a block; None: one for
    each column. by: measure that ranks columns; `random` is the release's other remasking. guidance: scale of
    classifier-free guidance away from the output without the prompt; 0: one look instead of two.
    """
    memory = guided(append() if denoiser.is_causal else WHOLE, guidance) if guidance else None
    return Procedure(blocks(denoiser.block or block, steps=steps), quota(by), memory)
