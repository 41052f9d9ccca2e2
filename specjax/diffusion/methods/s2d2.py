"""S2D2 in its exact form: a block-causal model drafts a block, and verifies it with the same weights and blocks of one.

Han, Wang, Gao, Xu, Srivastava: S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation (2026), arXiv
2603.25702.

Rule: one bidirectional pass over the next W columns gives drafts d_i with probabilities p_i. A second pass reads the
last decided token, the drafts d, and one mask token for the column of each draft. A mask token attends to the tokens
before its column and to itself. Its output is q_i, the model's distribution of that column with blocks of one. The
chain verifier goes from left to right and accepts d_i with probability min(1, q_i(d_i) / p_i(d_i)). After the first
rejection it draws one token from norm([q_i - p_i]+). If all drafts are accepted, it draws one more token from q.
Guarantee: distribution, that of the same model with blocks of one. It holds for models with `alignment="same"`.
Deviations: every round verifies, as in the paper with k = 1, and the cache is token-causal. Routers, which skip
verification in rounds with a low expected acceptance, are in the lossy method `s2d2_routed`, with a cache of full
blocks. At temperature 0 a draft is accepted if it is the most likely token; the release keeps its random test. The
window starts after the last decided column. For models with shifted logits use `linear_spec`, which reads no masks.
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
        raise UsageError(
            "s2d2 needs a mask token and unshifted logits, which this model does not have; choose linear_spec"
        )
    return Procedure(schedules.leading(block), rules.quota(), TOKEN_CAUSAL, verify=MASK_VERIFY)


def masked_mode(denoiser: Denoiser) -> Denoiser:
    """Return the autoregressive mode: blocks of one, in which a mask token reads each column."""
    return denoiser.replace(block=1)


MASK_VERIFY = Verify(
    functools.partial(decide, mask_rows=True), exact_memory=False, memory=TOKEN_CAUSAL, check=check, mode=masked_mode
)
