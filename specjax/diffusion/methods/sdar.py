"""SDAR's decoding of block-causal models: each pass decides the confident columns of a block, at least a fixed number.

Cheng et al.: SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation (2025), arXiv
2510.06303.

Rule: a block is decided in S passes, and k is the quota of a pass. `dynamic`: take {confidence > tau} if these are k or
more columns, else the k most confident. `static`: take the k most confident. `sequential`: take the k leftmost.
The confidence is the probability under the distribution that the token was drawn from, after temperature, top-k and
top-p. At temperature 0, which the release does not have, it is the probability at temperature 1. Quotas follow from the
length of a block, also in a first block that begins with the end of the prompt.
Guarantee: lossy. `static` is the definition; `dynamic` is lossy, and equal to `static` for tau > 1.
Deviations: the clean pass of a block is fused with the first pass over the next one
(`specjax.diffusion.caches.append`), which gives the same text in fewer passes. A quota larger than the number of masked
columns takes these; the release then overwrites decided columns. Entropy bounds are in `entropy_bound`.
"""

from __future__ import annotations

from typing import Literal

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.caches.append import append
from specjax.diffusion.rules.quota import quota, quota_of
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import ColumnRule, Denoiser, Procedure, Proposal, Schedule, View
from specjax.diffusion.validation import checked, only_with
from specjax.errors import UsageError
from specjax.types import Array

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
        Option(
            "fuse",
            "yes_or_no",
            None,
            "write a finished block into the cache in the first pass over the next one; default: yes, unless logits "
            "are shifted",
        ),
    ),
)


@only_with("remasking", tau=("dynamic",))
@checked
def sdar(
    denoiser: Denoiser,
    *,
    tau: float = 0.85,
    steps: int | None = None,
    remasking: Literal["dynamic", "static", "sequential"] = "dynamic",
    fuse: bool | None = None,
) -> Procedure:
    """Return the procedure.

    Args:
      tau: confidence above which a column is taken. steps: passes for a block; None: one for each column.
      remasking: rule that selects the columns of a pass. fuse: fuse the clean pass with the next block's first
        pass; None: unless the logits are shifted.

    Raises: UsageError for a model with full attention, or fuse=True for a model with shifted logits.
    """
    if not denoiser.is_causal:
        raise UsageError("sdar needs a block-causal model, and this one has full attention; choose method llada")
    if fuse and denoiser.is_shifted:
        raise UsageError(
            "fuse has no effect for a model with shifted logits, which need a separate pass over a finished block; "
            "leave fuse out"
        )
    rules = {"dynamic": dynamic_rule(tau), "static": quota_of(drawn), "sequential": quota("left_to_right")}
    return Procedure(sdar_blocks(denoiser.block, steps), rules[remasking], append(fuse=fuse is not False))


def sdar_blocks(block: int | None, steps: int | None) -> Schedule:
    """Return the schedule of SDAR, whose quotas follow from the length of a block."""
    return blocks(block, steps=steps, from_length=True)


def dynamic_rule(tau: float) -> ColumnRule:
    """Return the rule `dynamic`. tau: confidence above which a column is taken."""
    return threshold(tau, min_columns=None, measure=measures.drawn_confidence, strict=True)


def drawn(proposal: Proposal, view: View) -> Array:
    """Return the confidences float32[B, W] of SDAR."""
    return measures.drawn_confidence(proposal)
