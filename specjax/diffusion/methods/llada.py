"""LLaDA's decoding: blocks from left to right, and in each pass a fixed number of the most confident columns.

Nie et al.: Large Language Diffusion Models (2025), arXiv 2502.09992.

Rule: `specjax.diffusion.schedules.blocks` and `specjax.diffusion.rules.quota`.
Guarantee: definition. One column a pass (`steps=None`) is the quality reference for all faster methods.
Deviations: sampling adds Gumbel noise to the logits in float32; the release uses a ratio form in float64. The mask
token is never proposed. A row ends when its text up to an eos is decided, which does not change that text. The
release's options that forbid eos are not implemented; `eoser` decides end tokens late. Guidance is
`specjax.diffusion.caches.guided`.
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
    """Return the procedure.

    Args:
      block: columns of a block; None: all new ones. steps: passes for a block; None: one for each column.
      by: measure that ranks columns; `random` is the release's other remasking.
      guidance: scale of classifier-free guidance away from the output without the prompt. 0: no guidance, one forward
        pass instead of two.
    """
    memory = guided(append() if denoiser.is_causal else WHOLE, guidance) if guidance else None
    return Procedure(blocks(denoiser.block or block, steps=steps), quota(by), memory)
