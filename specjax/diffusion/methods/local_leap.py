"""LocalLeap: the threshold rule with a lower threshold near columns that are very confident.

Kong, Zhang, Liu, Wu, Tian, W., Zhou: Accelerating Diffusion LLM Inference via Local Determinism Propagation (LocalLeap,
2025), arXiv 2510.07081.

Rule: anchors are the eligible columns with confidence >= tau. Take the anchors, the eligible columns with confidence
>= near that are at most `radius` columns from an anchor, and always the most confident column.
Guarantee: lossy; a radius of 0, or near >= tau, is the threshold rule.
Deviations: the release may fill the text after its eos with eos; here a row ends at eos, which is the same text.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.types import Array

METHOD = Method(
    name="local_leap",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all confident columns, with a lower threshold near a very confident one",
    paper="Kong et al. 2025, arXiv 2510.07081",
    options=(
        shared.BLOCK,
        shared.tau(0.9),
        Option("near", "float", 0.75, "threshold next to a confident column"),
        Option("radius", "int", 4, "distance of columns that count as near"),
    ),
)


@checked
def local_leap(
    denoiser: Denoiser, *, block: int | None = 32, tau: float = 0.9, near: float = 0.75, radius: int = 4
) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. tau: confidence of an anchor. near:
    confidence at which a column within `radius` columns of an anchor is taken.
    """
    return Procedure(blocks(denoiser.block or block), around_anchors(tau, near, radius))


@functools.cache
def around_anchors(tau: float, near: float, radius: int) -> ColumnRule:
    """Return a rule that takes anchors and the confident columns around them.

    Raises: UsageError for a radius below 0.
    """
    if radius < 0:
        raise UsageError(f"radius must be at least 0, not {radius}")

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        sure = measures.confidence(proposal)
        anchors = view.eligible & (sure >= tau)
        size = (1, 2 * radius + 1)
        around = jax.lax.reduce_window(anchors.astype(jnp.int32), 0, jax.lax.max, size, (1, 1), "SAME") > 0
        take = anchors | (view.eligible & around & (sure >= near))
        return take | measures.most_confident(sure, view.eligible), proposal.token, state

    return ColumnRule(select)
