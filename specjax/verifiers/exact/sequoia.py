"""Sequoia: recursive rejection that continues uniformly once the draft's distribution is exhausted.

Chen et al.: Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding (2024), arXiv 2402.12374.

Rule at a node with children x_1 ... x_m in draft order, r <- p, d <- q, U the tokens without mass under q:
  accept x_j if u_j d(x_j) < r(x_j), and descend;
  else r <- norm([r - d]+), then d(x_j) <- 0, d <- norm(d); once d has no mass, d <- uniform on U.
If no child is left, the next token is drawn from r.
Guarantee: distribution, for siblings drawn without replacement from q and then from U. It equals `recursive_rejection`
as long as q does not run out of tokens.
Use: under top-k or top-p, a node can have more children than the drafter's distribution has tokens.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.trees.builders.static import SUPPORT
from specjax.verifiers.descent import Rule, descend, without
from specjax.verifiers.verifier import Verifier, normalise, residual, with_keys


def _enter(p, q, children):
    return p, jnp.where(q > SUPPORT, q, -1.0)  # negative: untested, and not drawn while q has tokens


def _reject(r, d, token):
    remaining = without(d, token)
    sampled, untested = jnp.maximum(remaining, 0.0), jnp.where(remaining < 0, 1.0, 0.0)
    exhausted = jnp.sum(sampled, -1, keepdims=True) == 0
    next_d = jnp.where(exhausted, normalise(untested, untested), normalise(sampled, sampled) - untested)
    return residual(r, jnp.maximum(d, 0.0)), next_d


core = functools.partial(descend, Rule(enter=_enter, reject=_reject))

sequoia = Verifier(
    "sequoia",
    with_keys(core),
    draws=("chain", "without_replacement", "without_replacement_then_uniform"),
    guarantee="distribution",
    summary="recursive rejection that continues uniformly once the draft's distribution is exhausted",
    paper="Chen et al. 2024, arXiv 2402.12374",
    by_row=True,
)
