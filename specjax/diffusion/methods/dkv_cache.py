"""dKV-Cache: LLaDA's decoding with keys and values that are cached one pass after their column was decided.

Ma et al.: dKV-Cache: The Cache for Diffusion Language Models (2025), arXiv 2505.15781.

Rule: `specjax.diffusion.caches.delayed`, with the schedule and the rule of `llada`. The number of passes is the same.
Guarantee: lossy; refresh=1 is `llada`.
Deviations: those of the cache.
"""

from __future__ import annotations

from specjax.catalog import Method, Option, shared
from specjax.diffusion.caches.delayed import Suffix, delayed
from specjax.diffusion.methods.llada import llada
from specjax.diffusion.rules.quota import By
from specjax.diffusion.types import Denoiser, Procedure
from specjax.diffusion.validation import checked
from specjax.errors import UsageError

METHOD = Method(
    name="dkv_cache",
    kind="diffusion",
    guarantee="lossy",
    summary="decides columns like llada, and caches each column one pass after its decision",
    paper="Ma et al. 2025, arXiv 2505.15781",
    options=(
        shared.BLOCK,
        shared.STEPS,
        shared.RANKING,
        Option("refresh", "int", 8, "passes over a block between two recomputations of the whole canvas"),
        Option("suffix", ("frozen", "fresh"), "frozen", "treatment of masked columns after the block"),
    ),
)


@checked
def dkv_cache(
    denoiser: Denoiser,
    *,
    block: int | None = 32,
    steps: int | None = None,
    by: By = "confidence",
    refresh: int | None = 8,
    suffix: Suffix = "frozen",
) -> Procedure:
    """Return the procedure. block, steps, by: as in `llada`. refresh: passes over a block between full recomputations;
    None: never. suffix: `fresh` also computes the masked columns after the block in every pass.

    Raises: UsageError for a block-causal model, in which finished columns never change.
    """
    if denoiser.is_causal:
        raise UsageError("dkv_cache needs a model with full attention, and this one is block-causal; choose sdar")
    return llada(denoiser, block=block, steps=steps, by=by).replace(memory=delayed(refresh, suffix))
