"""dParallel's decoding: each pass decides all columns with low entropy.

Chen, Fang, Ma, Yu, Wang: dParallel: Learnable Parallel Decoding for dLLMs (2025), arXiv 2509.26488. This is the decoder
for models distilled for certainty; the distillation is `specjax.training.methods.certainty_forcing`.

Rule: take the eligible columns with entropy <= eta, in nats, and always the one with the lowest entropy.
Guarantee: lossy; eta < 0 is one column a pass, by entropy.
"""

from __future__ import annotations

import functools

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.types import Array

METHOD = Method(
    name="dparallel",
    kind="diffusion",
    guarantee="lossy",
    summary="decides all columns of low entropy, for models distilled for certainty",
    paper="Chen et al. 2025, arXiv 2509.26488",
    options=(
        shared.BLOCK,
        Option("eta", "float", 0.5, "maximum entropy of a decided column, in nats"),
    ),
)


@checked
def dparallel(denoiser: Denoiser, *, block: int | None = 32, eta: float = 0.5) -> Procedure:
    """Return the procedure. block: columns of a block; None: all new ones. eta: maximum entropy of a taken column; 0.45
    for Dream.
    """
    return Procedure(blocks(denoiser.block or block), certain(eta))


@functools.cache
def certain(eta: float) -> ColumnRule:
    """Return a rule that takes every column with an entropy of at most `eta`."""

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        entropy = measures.entropy(proposal.logits)
        surest = measures.most_confident(-entropy, view.eligible)
        return (view.eligible & (entropy <= eta)) | surest, proposal.token, state

    return ColumnRule(select)
