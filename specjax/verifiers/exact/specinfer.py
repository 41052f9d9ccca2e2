"""SpecInfer: recursive rejection sampling over children drawn independently, with replacement.

Miao et al.: SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative Inference and
Verification (ASPLOS 2024), arXiv 2305.09781.

Rule at a node with children x_1 ... x_m, r <- p: accept x_j if u_j q(x_j) < r(x_j), and descend; else
r <- norm([r - q]+). If no child is left, the next token is drawn from r.
Guarantee: distribution. A duplicate of a rejected token has r = 0 and is rejected too, which only wastes budget. Equal
siblings are one context, so the children of all of them are tested after one is accepted.
"""

from __future__ import annotations

import functools

from specjax.verifiers.descent import Rule, descend
from specjax.verifiers.verifier import Verifier, residual, with_keys

core = functools.partial(
    descend, Rule(enter=lambda p, q, children: (p, q), reject=lambda r, d, token: (residual(r, d), d))
)

specinfer = Verifier(
    "specinfer",
    with_keys(core),
    draws=("chain", "with_replacement", "with_replacement_uneven"),
    guarantee="distribution",
    summary="tests independent siblings in turn against the same q",
    paper="Miao et al. 2024, arXiv 2305.09781",
    by_row=True,
)
