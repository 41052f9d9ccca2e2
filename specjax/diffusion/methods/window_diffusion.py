"""Window-Diffusion: passes read a window of near columns, decide the nearest ones, and share a cache for a while.

Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching (2026), arXiv
2601.20332.

Rule: `specjax.diffusion.schedules.sliding` with `specjax.diffusion.caches.phases`. Each pass decides the most confident
of the columns that may be decided, or with `tau` all columns at or above this confidence.
Guarantee: lossy; outer and inner windows of all new columns with refresh=1 give `llada` without blocks.
Deviations: the first pass of a phase decides the same columns as the other passes. The release's LLaDA decides any
column in that pass, and its Dream decides the first column. The masked columns that may be decided lie within `outer`
columns of the first one. `early` drops the columns after an end token as soon as one is decided.
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
    summary="computes a window of masked columns, caches those around it, and decides the first few",
    paper="arXiv 2601.20332",
    options=(
        Option("outer", "int", 64, "masked columns that are visible"),
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
    """Return the procedure.

    Args:
      outer: masked columns that the model reads. inner: masked columns that may be decided.
      refresh: passes of a phase. tau: confidence at which a column is decided; None: one column per pass.
      early: end the text at the first end-of-text token.

    Raises: UsageError for a block-causal model.
    """
    if denoiser.is_causal:
        raise UsageError(
            "window_diffusion needs a model with full attention, and this one is block-causal; choose sdar"
        )
    return Procedure(
        sliding(inner, outer),
        quota() if tau is None else threshold(tau),
        phases(outer, inner, refresh),
        control=ends_the_text() if early else None,
    )
