"""SDAR's decoding of block-causal models: each pass decides the confident columns of a block, at least a fixed number.

Cheng et al.: SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation (2025), arXiv
2510.06303.

Rule: a block is decided in S passes, and k is the quota of a pass. `dynamic`: take {confidence > tau} if these are k or
more columns, else the k most confident. `static`: take the k most confident. `sequential`: take the k leftmost.
Guarantee: lossy. `static` is the definition; `dynamic` is lossy, and equal to `static` for tau > 1.
Deviations: the clean pass of a block is fused with the first pass over the next one
(`specjax.diffusion.caches.append`), which gives the same text in fewer passes. Entropy bounds are in `entropy_bound`.
"""

from __future__ import annotations

from typing import Literal

from specjax.catalog import Method, Option, shared
from specjax.diffusion.caches.append import append
from specjax.diffusion.rules import quota, threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Denoiser, Procedure
from specjax.diffusion.validation import checked
from specjax.errors import UsageError

METHOD = Method(
    name="sdar",
    kind="diffusion",
    guarantee="lossy",
    summary="for block-causal models: decides all confident columns of a block, at least a fixed number per pass",
    paper="Cheng et al. 2025, arXiv 2510.06303",
    options=(
        shared.tau(0.85),
        shared.STEPS,
        Option("remasking", ("dynamic", "static", "sequential"), "dynamic", "rule that selects the columns of a pass"),
        Option("fuse", "yes_or_no", True, "write a finished block into the cache in the first pass over the next one"),
    ),
)


@checked
def sdar(
    denoiser: Denoiser,
    *,
    tau: float = 0.85,
    steps: int | None = None,
    remasking: Literal["dynamic", "static", "sequential"] = "dynamic",
    fuse: bool = True,
) -> Procedure:
    """Return the procedure.

    Args:
      tau: confidence at which a column is taken. steps: passes for a block; None: one for each column.
      remasking: rule that selects the columns of a pass. fuse: fuse the clean pass with the next block's first pass.

    Raises: UsageError for a model with full attention.
    """
    if not denoiser.is_causal:
        raise UsageError("sdar needs a block-causal model, and this one has full attention; choose method llada")
    rules = {"dynamic": threshold(tau, min_columns=None), "static": quota(), "sequential": quota("left_to_right")}
    return Procedure(blocks(denoiser.block, steps=steps), rules[remasking], append(fuse=fuse))
