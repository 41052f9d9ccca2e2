"""Greedy multi-draft: the likeliest tokens of the drafter are fixed siblings of one sampled token.

Hu, Zheng, Viswanathan, Chen, Rossi, Wu, Manocha, Huang: Towards Optimal Multi-draft Speculative Decoding (ICLR 2025),
arXiv 2502.18779.

Draft: T contains the n - 1 likeliest tokens under q; x is drawn from q', which is q without T.
Rule, with x tested first and r <- p:
  accept x if u q'(x) < p(x), else r <- norm([p - q']+);
  accept t in T if u < r(t), else r(t) <- 0, r <- norm(r).
If no child is left, the next token is drawn from r. Testing T in turn is equivalent to drawing y from r and testing
whether y is in T.
Guarantee: distribution. It accepts P(T) + sum_{x not in T} min(p(x), q'(x)), the most possible for such drafts.
`logits` of the tree contains log q', so a child without mass there is a fixed one.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.verifiers.descent import Rule, descend, without
from specjax.verifiers.verifier import Verifier, normalise, residual, with_keys


def _reject(r, d, token):
    sampled = jnp.take_along_axis(d, token[:, None], 1) > 0
    fixed = without(r, token)
    return jnp.where(sampled, residual(r, d), normalise(fixed, r)), jnp.where(sampled, 0.0, d)


core = functools.partial(
    descend,
    Rule(
        enter=lambda p, q, children: (p, q),
        reject=_reject,
        weight=lambda d_x: jnp.where(d_x > 0, d_x, 1.0),  # a point mass
    ),
)

greedy_multi_draft = Verifier(
    "greedy_multi_draft",
    with_keys(core),
    draws=("chain", "top_and_sampled"),
    guarantee="distribution",
    summary="tests one sampled sibling first, then the drafter's likeliest tokens as point masses",
    paper="Hu et al. 2025, arXiv 2502.18779",
    by_row=True,
)
