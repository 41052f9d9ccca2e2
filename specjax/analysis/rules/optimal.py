"""The best acceptance that any rule can reach at one node, for a given way to draw the siblings.

Hu, Zheng, Viswanathan, Chen, Rossi, Wu, Manocha, Huang: Towards Optimal Multi-draft Speculative Decoding (ICLR 2025),
arXiv 2502.18779.

The best coupling of n drafts and the target's token is a maximum flow, so its value is a minimum cut over token sets:
  alpha* = 1 + min_H [P(H) - Q(H)],  P(H) = sum of p over H,  Q(H) = P(all n drafts lie in H).
A best H is a prefix of the tokens in ascending order of p/q, so V + 1 sets are enough.
With replacement Q(H) = (sum of q over H)^n. Without replacement and for n = 2, Q(H) = Q_H - A_H (1 - Q_H) with Q_H
the sum of q and A_H that of q / (1 - q). For more drafts let token i ring after an exponential time of rate q_i. All n
drafts lie in H if n tokens of H ring before any other, so Q(H) = E[P(N_H(t) >= n)], t the first ring outside H and
N_H(t) a sum of independent coins. This integral is not in the paper, which needs only Q(H). The trapezoid rule in log t
converges exponentially. All prefixes share its nodes, so one pass over the tokens computes all of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from specjax.errors import UsageError

BoundDraws = Literal["with_replacement", "without_replacement"]
STEP = 0.3
"""Step of the trapezoid rule in log t. Its error is about exp(-pi^2 / STEP), 5e-15."""
ELEMENTS = 1 << 18
"""Largest number of elements that are integrated together, so that they fit into the processor's cache."""


class OptimalAcceptance(NamedTuple):
    """The bound and the token set that attains it."""

    acceptance: np.ndarray  # float64[...], alpha*
    order: np.ndarray  # int64[..., V], tokens by p/q, ascending; those with q = 0 last
    prefix: np.ndarray  # int64[...], length of the prefix of `order` that is the smallest best set H


def optimal_acceptance(p, q, n: int, draws: BoundDraws = "with_replacement") -> OptimalAcceptance:
    """Return the largest probability of accepting one of n siblings drawn from q while preserving the distribution p.

    Args:
      p, q: distributions float[..., V] of target and draft. They are normalised here.
      n: number of siblings, at least 1. Without replacement it is limited to the tokens with q > 0.

    Returns: OptimalAcceptance, probabilities in float64.
    Raises: UsageError for arrays that are not distributions, n < 1 or unknown draws.
    """
    if draws not in get_args(BoundDraws):
        raise UsageError(f'draws must be with_replacement or without_replacement, not "{draws}"')
    p, q = check_distributions(p, q, n)
    shape = p.shape[:-1]
    p, q = p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1])
    order = order_by_ratio(p, q)
    sorted_p, sorted_q = (np.take_along_axis(x, order, 1) for x in (p, q))
    if draws == "with_replacement":
        inside = np.minimum(_sums(sorted_q), 1.0) ** n
    else:
        inside = np.zeros((len(q), q.shape[1] + 1))
        drawn = np.minimum(n, (q > 0).sum(1))  # drawing without replacement ends when no token is left
        for count in np.unique(drawn):
            inside[drawn == count] = _all_inside(sorted_q[drawn == count], int(count))
    value = _sums(sorted_p) - inside
    best = value.min(1)
    prefix = np.argmax(value <= best[:, None] + 1e-12, 1)  # rounding must not select a longer set
    return OptimalAcceptance(
        np.clip(1 + best, 0.0, 1.0).reshape(shape), order.reshape(*shape, -1), prefix.reshape(shape)
    )


def check_distributions(p, q, n: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return p and q as normalised float64[..., V].

    Raises: UsageError for n below 1, other shapes, negative entries, or sums other than 1.
    """
    if n < 1:
        raise UsageError(f"n must be at least 1 draft, not {n}")
    p, q = (np.asarray(x, np.float64) for x in (p, q))
    if p.shape != q.shape or not p.ndim or not p.size:
        raise UsageError(f"p and q must be distributions of one shape [..., V], not {p.shape} and {q.shape}")
    for name, x in (("p", p), ("q", q)):
        total = x.sum(-1)
        if not (np.all(x >= 0) and np.all(np.abs(total - 1) < 1e-3)):  # nan fails both
            raise UsageError(f"{name} is not a distribution: its entries must be at least 0 and sum to 1")
    return p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)


def order_by_ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return tokens int64[..., V] in ascending order of p/q, those with q = 0 last. Ties are ordered by id."""
    with np.errstate(over="ignore"):
        ratio = np.where(q > 0, p / np.where(q > 0, q, 1.0), np.inf)
    return np.lexsort((q == 0, ratio), axis=-1)


def _sums(x: np.ndarray) -> np.ndarray:
    """Return float64[R, V + 1], the sums of the first 0, 1, ... entries."""
    return np.pad(np.cumsum(x, 1), ((0, 0), (1, 0)))


def _all_inside(q: np.ndarray, n: int) -> np.ndarray:
    """Return float64[R, V + 1], P(n draws without replacement lie among the first m tokens), for rows with n tokens."""
    inside, outside = np.minimum(_sums(q), 1.0), np.pad(np.cumsum(q[:, ::-1], 1)[:, ::-1], ((0, 0), (0, 1)))
    if n == 1:
        return inside
    if n == 2:
        chance = inside - _sums(q / np.maximum(1 - q, 1e-300)) * outside
    else:
        chance = np.zeros_like(inside)
        low, high = -16.0, np.log(40 / outside[outside > 0].min())
        time = np.exp(np.arange(low, high + STEP, STEP))
        rows = max(1, ELEMENTS // (n * len(time)))
        for start in range(0, len(q), rows):
            part = slice(start, start + rows)
            chance[part] = _integrate(q[part], outside[part], time, n)
    chance = np.where(outside > 0, np.clip(chance, 0.0, 1.0), 1.0)
    return np.where(_sums((q > 0).astype(np.int64)) >= n, chance, 0.0)


def _integrate(q: np.ndarray, outside: np.ndarray, time: np.ndarray, n: int) -> np.ndarray:
    """Return float64[R, V + 1], E[P(N_H(t) >= n)] for t exponential of rate `outside`, at the nodes `time` [T]."""
    chance = np.zeros_like(outside)
    fewer = np.zeros((n, len(q), len(time)))  # P(N_H(t) = k), k < n
    fewer[0] = 1.0
    for token in range(int((q > 0).sum(1).max())):
        silent = np.exp(-q[:, token, None] * time)
        rung = -np.expm1(-q[:, token, None] * time)
        for k in range(n - 1, 0, -1):
            fewer[k] = fewer[k] * silent + fewer[k - 1] * rung
        fewer[0] *= silent
        hazard = outside[:, token + 1, None] * time
        weight = np.where(hazard < 700, hazard * np.exp(-np.minimum(hazard, 700.0)), 0.0)
        chance[:, token + 1] = STEP * np.sum((1 - fewer.sum(0)) * weight, 1)
    return chance
