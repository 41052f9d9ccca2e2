"""Window-Diffusion: only near columns are seen, only the nearest are decided, and the cache lasts for some passes.

Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching (2026), arXiv
2601.20332.

Rule: `specjax.diffusion.schedules.sliding` with `specjax.diffusion.caches.phases`; of the columns that may be decided
the surest one in each pass, or with `tau` every one that is sure enough.
Guarantee: lossy; outer and inner windows of all new columns and refresh=1 are `llada` without blocks.
Deviations: the first pass of a phase decides only what the others may (the release's LLaDA decides anywhere then, its
Dream the first column). The open columns that may be decided lie within `outer` columns of the first one. Of `early`,
which drops what is behind an end of the text: it does so as soon as one is decided.
"""

from __future__ import annotations

from specjax.catalog import Method, Option
from specjax.diffusion.caches.phases import phases
from specjax.diffusion.methods.learn2pd import ends_the_text
from specjax.diffusion.rules.quota import quota
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.sliding import sliding
from specjax.diffusion.types import Denoiser, Procedure
from specjax.diffusion.validation import checked
from specjax.errors import UsageError

METHOD = Method(
    name="window_diffusion",
    kind="diffusion",
    guarantee="lossy",
    summary="computes a window of open columns, caches those around it, and decides the first few",
    paper="arXiv 2601.20332",
    options=(
        Option("outer", "int", 64, "open columns that are visible"),
        Option("inner", "int", 16, "visible columns that may be decided"),
        Option("refresh", "int", 32, "passes between two recomputations of the cached columns"),
        Option("tau", "float", None, "confidence at which a column is decided; default: one column per pass"),
        Option("early", "yes_or_no", False, "end the text at the first end-of-text token"),
    ),
)


@checked
def window_diffusion(
    denoiser: Denoiser,
    *,
    outer: int = 64,
    inner: int = 16,
    refresh: int = 32,
    tau: float | None = None,
    early: bool = False,
) -> Procedure:
    """Return the procedure. outer: open columns that the model reads. inner: open columns that may be decided. refresh:
    passes of a phase. tau: confidence at which a column is decided; None: one per pass. early: end the text with the
    first column that ends it.

    Raises: UsageError for a block-causal model.
    """
    if denoiser.is_causal:
        raise UsageError("window_diffusion is of models with full attention, and this one is block-causal; choose sdar")
    return Procedure(
        sliding(inner, outer),
        quota() if tau is None else threshold(tau),
        phases(outer, inner, refresh),
        control=ends_the_text() if early else None,
    )
