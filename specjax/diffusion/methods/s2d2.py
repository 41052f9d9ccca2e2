"""S2D2, where it is exact: a block-causal model drafts a block, and judges it by itself with blocks of one.

Han, Wang, Gao, Xu, Srivastava: S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation (2026), arXiv
2603.25702.

Rule: one pass in both directions over the next W columns gives drafts d_i with probabilities p_i. One pass over the
last decided token, d, and a mask at each of their columns, which sees what stands before it and itself, gives q_i, what
the model says of one open column. Left to right accept d_i with probability min(1, q_i(d_i) / p_i(d_i)), and after the
first rejection one token of norm([q_i - p_i]+), else one of q: the chain verifier.
Guarantee: distribution, of the model's own mode with blocks of one and logits of the same position.
Deviations: this is the setting in which every round verifies, with k = 1 and a token-causal cache. The routers, which
decide by expected acceptance whether to verify, and the cache of whole blocks are `s2d2_routed`, which is lossy. At
temperature 0 a draft stands if it is the likeliest token; the release keeps its random test. The window begins behind
the last decided column. Models with shifted logits have `linear_spec`, which needs no masks.
"""

from __future__ import annotations

import functools

from specjax.catalog import Method
from specjax.diffusion import rules, schedules
from specjax.diffusion.caches import TOKEN_CAUSAL
from specjax.diffusion.methods.linear_spec import causal_block, check, decide
from specjax.diffusion.types import Denoiser, Procedure, Verify
from specjax.diffusion.validation import checked
from specjax.errors import UsageError

METHOD = Method(
    name="s2d2",
    kind="diffusion",
    guarantee="distribution",
    summary="for block-causal models: drafts a block in one pass and verifies it with the same model at block size 1",
    paper="Han et al. 2026, arXiv 2603.25702",
)


@checked
def s2d2(denoiser: Denoiser) -> Procedure:
    """Return the procedure. Each round drafts one block.

    Raises: UsageError for a model with full attention, or with shifted logits.
    """
    block = causal_block(denoiser, "s2d2")
    if denoiser.is_shifted or denoiser.mask_token is None:
        raise UsageError("s2d2 asks a mask for its own column, and this model's logits are shifted; choose linear_spec")
    return Procedure(schedules.leading(block), rules.quota(), TOKEN_CAUSAL, verify=MASK_VERIFY)


MASK_VERIFY = Verify(functools.partial(decide, mask_rows=True), exact_memory=False, memory=TOKEN_CAUSAL, check=check)
