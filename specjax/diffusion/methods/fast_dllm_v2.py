"""Fast-dLLM v2: decoding of block-causal models made from autoregressive ones, with sub-blocks from left to right.

Wu et al.: Fast-dLLM v2: Efficient Block-Diffusion LLM (2025), arXiv 2509.26328.

Rule: the pass that reads a finished block also decides the first column of the next block, with the output of its last
column. In the leftmost sub-block with a masked column, take {confidence >= tau}, at least the most confident column.
The confidence of a token is its share of the nucleus of `top_p`.
Guarantee: lossy; tau > 1 is one column a pass. A sub-block of the full block and a top_p of 1 is the loop of SDAR.
Deviations: the test is >= tau, and > in the release. The release's sub-block cache, off by default, is not implemented.
The nucleus affects confidences only: tokens are drawn with the `top_p` of `denoise`.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.caches.append import append
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import ColumnRule, Denoiser, Procedure, Proposal, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.numerics.sampling import warp
from specjax.types import Array, Sampling

METHOD = Method(
    name="fast_dllm_v2",
    kind="diffusion",
    guarantee="lossy",
    summary="for seeded block-causal models: decides all confident columns of sub-blocks, from left to right",
    paper="Wu et al. 2025, arXiv 2509.26328",
    options=(
        shared.tau(0.9),
        Option(
            "sub_block", "int", None, "columns per sub-block; default: 8, or the whole block if 8 does not divide it"
        ),
        Option("top_p", "float", 0.95, "nucleus mass for the normalisation of confidences"),
    ),
)


SUB_BLOCK = 8


@checked
def fast_dllm_v2(
    denoiser: Denoiser, *, tau: float = 0.9, sub_block: int | None = None, top_p: float = 0.95
) -> Procedure:
    """Return the procedure. tau: confidence at which a column is taken. sub_block: columns of a sub-block; None: 8, or
    the block if 8 does not divide it. top_p: mass of the nucleus that normalises confidences.

    Raises: UsageError for a model that is not block-causal and seeded, or sub-blocks that do not divide its block.
    """
    size = denoiser.block
    if size is None or denoiser.seeding != "seed_and_mask":
        other = "llada" if size is None else "sdar"
        raise UsageError(
            "fast_dllm_v2 needs a block-causal model with seeding='seed_and_mask', and this one is not; "
            f"choose method {other}"
        )
    if sub_block is None:
        sub_block = size if size % SUB_BLOCK else SUB_BLOCK
    return Procedure(blocks(size, sub_block=sub_block), in_nucleus(threshold(tau), top_p), append())


@functools.cache
def in_nucleus(rule: ColumnRule, top_p: float) -> ColumnRule:
    """Return a rule that measures confidence within the nucleus of each column.

    Raises: UsageError for an invalid top_p.
    """
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p must be above 0 and at most 1, not {top_p}")

    def select(params, state, proposal: Proposal, view: View, quota: Array):
        nucleus = warp(
            measures.sampling_logits(proposal), Sampling(temperature=jnp.float32(1), top_p=jnp.float32(top_p))
        )
        return rule.select(params, state, proposal._replace(logits=nucleus), view, quota)

    return rule.replace(select=select)
