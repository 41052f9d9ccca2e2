"""Recursive rejection sampling over trees whose siblings were drawn without replacement (RSD).

Jeon, Gagrani, Goel, Park, Lee, Lott: Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without
Replacement (2024), arXiv 2402.14160. A chain is the tree with one child per node.

Rule at a node with children x_1 ... x_m in draft order, r <- p, d <- q:
  accept x_j if u_j d(x_j) < r(x_j), and descend;
  else r <- norm([r - d]+), then d(x_j) <- 0, d <- norm(d).
If no child is left, the next token is drawn from r.
Guarantee: distribution.
Deviation: a drafted token with d(x) = 0 (mismatched warping) is rejected and leaves r unchanged.
"""

from __future__ import annotations

import functools

from specjax.verifiers.descent import WITHOUT_REPLACEMENT, descend
from specjax.verifiers.verifier import Verifier, with_keys

core = functools.partial(descend, WITHOUT_REPLACEMENT)

recursive_rejection = Verifier(
    "recursive_rejection",
    with_keys(core),
    draws=("chain", "without_replacement"),
    guarantee="distribution",
    summary="tests siblings in turn, each against the residual of the previous ones",
    paper="Jeon et al. 2024, arXiv 2402.14160",
    by_row=True,
)
