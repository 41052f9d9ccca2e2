"""SpecTr: the k-SEQ rule for k drafts drawn independently, with replacement.

Sun, Suresh, Ro, Beirami, Jain, Yu: SpecTr: Fast Speculative Decoding via Optimal Transport (NeurIPS 2023),
arXiv 2310.15141.

Rule at a node with k children: let beta(rho) = sum_x min(q(x), p(x) / rho), and rho the root in [1, k] of
  1 - (1 - beta)^k = rho beta.
Accept the first child with u_j rho q(x_j) < p(x_j). If no child passes, the next token is drawn from
  norm(p - min(q, p / rho) p_acc / beta) with p_acc = 1 - (1 - beta)^k.
Guarantee: distribution. It accepts at least 1 - (1 - 1/k)^k of the best possible rate.
rho is found by bisection, from above, because the rule is exact for any larger rho too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.types import Array
from specjax.verifiers.descent import Rule, descend
from specjax.verifiers.verifier import Verifier, normalise, with_keys

BISECTIONS = 26
"""Steps of the bisection, two more than the 24 bits of a float32 mantissa."""


def division_factor(p: Array, q: Array, k: Array) -> Array:
    """Return rho float32[B] for distributions [B, V] and k [B] children."""
    k = jnp.maximum(k, 1).astype(jnp.float32)

    def too_small(rho):
        beta = _beta(p, q, rho)
        return _any_accepted(beta, k) > rho * beta

    def body(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        small = too_small(middle)
        return jnp.where(small, middle, low), jnp.where(small, high, middle)

    ones = jnp.ones_like(k)
    high = jax.lax.fori_loop(0, BISECTIONS, body, (ones, k))[1]
    return jnp.where(too_small(ones), high, ones)  # p = q, or one child


def _beta(p, q, rho):
    return jnp.minimum(jnp.sum(jnp.minimum(q, p / rho[:, None]), -1), 1.0)


def _any_accepted(beta, k):
    """Return 1 - (1 - beta)^k."""
    return -jnp.expm1(k * jnp.log1p(-beta))


def _enter(p, q, children):
    return p, q * division_factor(p, q, children)[:, None]


def _final(p, d, children):
    """Return the distribution of the next token. d is rho q, so its mass is rho."""
    rho = jnp.sum(d, -1)
    rho = jnp.where(rho > 0, rho, 1.0)
    taken = jnp.minimum(d, p) / rho[:, None]
    beta = jnp.minimum(jnp.sum(taken, -1), 1.0)
    k = jnp.maximum(children, 1).astype(jnp.float32)
    share = jnp.where(beta > 0, _any_accepted(beta, k) / jnp.where(beta > 0, beta, 1.0), 0.0)
    remaining = jnp.maximum(p - taken * share[:, None], 0.0)
    return jnp.where((children > 0)[:, None], normalise(remaining, p), p)


core = functools.partial(descend, Rule(enter=_enter, reject=lambda p, d, token: (p, d), final=_final))

spectr = Verifier(
    "spectr",
    with_keys(core),
    draws=("chain", "with_replacement", "with_replacement_uneven"),
    guarantee="distribution",
    summary="tests k independent siblings in turn against q enlarged by one factor (k-SEQ)",
    paper="Sun et al. 2023, arXiv 2310.15141",
    by_row=True,
)
