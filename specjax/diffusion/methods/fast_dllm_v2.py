"""Fast-dLLM v2: decoding of block-causal models made from autoregressive ones, with sub-blocks from left to right.

Wu et al.: Fast-dLLM v2: Efficient Block-Diffusion LLM (2025), arXiv 2509.26328.

Rule: the pass that reads a finished block also decides the first column of the next block. It takes the most likely
token of the block's last output row, at any temperature. In the leftmost sub-block with a masked column, take
{confidence > tau}, at least the most confident column. At a temperature above 0, tokens are drawn from the nucleus of
mass `top_p`, and the confidence of a token is its share of the nucleus. At temperature 0 the confidence is the plain
probability, and there is no nucleus.
Guarantee: lossy; tau > 1 is one column a pass. At temperature 0 a sub-block of the full block is the loop of SDAR.
Deviations: the release's sub-block cache, off by default, is not implemented. If `denoise` has a top_p too, the smaller
of both applies.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.catalog import Method, Option, shared
from specjax.diffusion import measures
from specjax.diffusion.caches.append import append
from specjax.diffusion.rules.threshold import threshold
from specjax.diffusion.schedules.blocks import blocks
from specjax.diffusion.types import Denoiser, Procedure, Score, View
from specjax.diffusion.validation import checked
from specjax.errors import UsageError
from specjax.numerics.sampling import warp
from specjax.types import Array, PyTree, Sampling

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
        Option("top_p", "float", 0.95, "nucleus that tokens are drawn from, at a temperature above 0"),
    ),
)


SUB_BLOCK = 8


@checked
def fast_dllm_v2(
    denoiser: Denoiser, *, tau: float = 0.9, sub_block: int | None = None, top_p: float = 0.95
) -> Procedure:
    """Return the procedure. tau: confidence above which a column is taken. sub_block: columns of a sub-block; None: 8,
    or the block if 8 does not divide it. top_p: mass of the nucleus that tokens are drawn from.

    Raises: UsageError for a model that is not block-causal and seeded, sub-blocks that do not divide its block, or an
    invalid top_p.
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
    rule = threshold(tau, measure=measures.drawn_confidence, strict=True)
    return Procedure(blocks(size, sub_block=sub_block), rule, append(), score=nucleus(top_p))


@functools.cache
def nucleus(top_p: float) -> Score:
    """Return a score that draws from the nucleus of mass `top_p`, and the first column of a block greedily.

    Raises: UsageError for an invalid top_p.
    """
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p must be above 0 and at most 1, not {top_p}")

    def narrow(params: PyTree, logits: Array, sampling: Sampling, view: View) -> Array:
        mass = jnp.float32(top_p) if sampling.top_p is None else jnp.minimum(sampling.top_p, top_p)
        # Only the pass that reads a finished block predicts the first column of a window.
        seed = view.eligible & (jnp.arange(logits.shape[1]) == 0)
        return jnp.where(seed[..., None], warp(logits, Sampling()), warp(logits, sampling._replace(top_p=mass)))

    return Score(warp=narrow)
