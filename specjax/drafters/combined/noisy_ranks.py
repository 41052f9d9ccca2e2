"""Ranks of candidate tokens by the noise of the target's own draws, for coupled sampling.

The target draws the token with the largest log p + noise at a position (Gumbel-max), and the noise depends only on the
key and the position. A drafter that computes the noise of a few candidates can therefore draft the likely winner of
the race instead of the likeliest token. If its q equals p on the candidates, it fails only if another token wins.

Daliri, Musco and Suresh, Coupling without Communication and Drafter-Invariant Speculative Decoding (2024),
arXiv 2408.07978, draft with the noise of the target. Here the same noise also ranks stored tokens.

Rule: the score of a token is s_i = log q_i / temperature + noise_i, and R is the mass of tokens that are no candidates.
  chance of token i = exp(s_i) / (sum over the candidates of exp(s_j)) * exp(-R exp(-s_i)).
The second factor is the probability that no other token wins against i. The quotient is an estimate for a q that is
not exact. `auto` calibrates it: it is only a class of the token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.drafters.tables.token_recycling import RANKS, SuccessorLookup
from specjax.numerics import sampling
from specjax.trees import contracts
from specjax.trees.templates import Template
from specjax.types import Array, Context, TokenTree


class Ranked(NamedTuple):
    """Candidates in the order of their chances to be drawn."""

    tokens: Array  # int32[..., K]; -1: no further candidate
    chance: Array  # float32[..., K], falling


def heat_of(context: Context) -> Array:
    """Return the temperature float32[B], at least `COLD`, below which noise changes no order."""
    assert context.sampling.temperature is not None
    temperature = jnp.broadcast_to(context.sampling.temperature, context.length.shape)
    return jnp.maximum(temperature.astype(jnp.float32), contracts.COLD)


def noise_at(context: Context, depth: Array | np.ndarray, tokens: Array) -> Array:
    """Return the noise float32[B, n, ...] of tokens int32[B, n, ...] that follow nodes at `depth` int32[B, n] or [n].

    It is that of the target's draws, and 0 in greedy rows. If JAX's partitionable threefry is off, it is another one,
    and drafts get worse.
    """
    assert context.noise is not None
    depth = jnp.broadcast_to(depth, tokens.shape[:2])
    keys = sampling.node_keys(context.noise, context.length, depth)
    flat = jnp.maximum(tokens, 0).reshape(*depth.shape, -1)
    noise = contracts.noise_at(keys, flat).reshape(tokens.shape)
    is_greedy = sampling.is_greedy(context.sampling, len(tokens)).reshape(-1, *[1] * (tokens.ndim - 1))
    return jnp.where(is_greedy, 0.0, noise)


def rank_candidates(context: Context, depth: np.ndarray, tokens: Array, log_q: Array) -> Ranked:
    """Rank candidates int32[B, n, K] of n places by log q and noise.

    Args:
      depth: int[n], depth of the node before each place. tokens: -1 for no candidate.
      log_q: float32[B, n, K], log-probabilities at temperature 1.
    """
    heat, is_token = heat_of(context)[:, None, None], (tokens >= 0) & (log_q > -jnp.inf)
    q = jnp.where(is_token, jnp.exp(log_q), 0.0)
    other_mass = jnp.maximum(1 - jnp.sum(q, -1, keepdims=True), 0.0)
    lowest = jnp.min(jnp.where(is_token, log_q, 0.0), -1, keepdims=True)  # no other token is likelier at rank K
    other_mass *= jnp.exp(jnp.minimum(1 / heat - 1, 100.0) * lowest)
    scores = jnp.where(is_token, log_q / heat + noise_at(context, depth, tokens), -jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(jnp.max(scores, -1, keepdims=True), -1e30))
    chance = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-30)
    chance *= jnp.exp(-other_mass * jnp.exp(-jnp.clip(scores, -80, 80)))
    return _sorted(jnp.where(is_token, tokens, -1), scores, jnp.where(is_token, chance, 0.0))


def _sorted(tokens: Array, scores: Array, chance: Array) -> Ranked:
    """Sort K candidates by falling scores. K is small, so comparisons of all pairs are faster than a sort."""
    index = np.arange(tokens.shape[-1])
    wins = (scores[..., None, :] > scores[..., :, None]) | (
        (scores[..., None, :] == scores[..., :, None]) & (index[None, :] < index[:, None])
    )
    rank = jnp.sum(wins, -1)
    has_rank = rank[..., None, :] == index[:, None]  # [..., rank, K]
    pick = lambda x: jnp.sum(jnp.where(has_rank, x[..., None, :], 0), -1)
    return Ranked(pick(tokens), pick(chance))


def noisy_tree(
    template: Template, successors: SuccessorLookup, context: Context, limit: Array
) -> tuple[TokenTree, Array]:
    """Fill a template with the successors that are likely to be drawn, and return their chances float32[B, N - 1].

    It is `token_recycling.recycled_tree` with ranks by log p and noise. limit: int32[B].
    """
    level = context.root  # tokens; -1: unknown
    tokens, chances = [level], []
    for depth, (place, ranks) in enumerate(template.below_root()):
        inner, of_child = np.unique(place, return_inverse=True)
        parent = level[:, inner]
        candidates, log_p = successors.after(jnp.maximum(parent, 0), np.arange(RANKS)[None])  # [B, n, 8]
        assert log_p is not None
        candidates = jnp.where(parent[..., None] >= 0, candidates, -1)
        ranks_of = rank_candidates(context, np.full(len(inner), depth), candidates, log_p)
        child = of_child * RANKS + ranks
        flat = lambda x: x.reshape(len(limit), -1)
        level = take_along(flat(ranks_of.tokens), jnp.asarray(child)[None], 1)
        tokens.append(level)
        chances.append(take_along(flat(ranks_of.chance), jnp.asarray(child)[None], 1))
    return template.filled(tokens, limit), jnp.concatenate(chances, 1)
