"""Grouped Speculative Decoding (GSD): a drafted token is tested as a member of its cluster.

So et al.: Grouped Speculative Decoding for Autoregressive Image Generation (ICCV 2025), arXiv 2508.07747.

Rule: accept x_i while u_i sum_{y in C} q_i(y) < sum_{y in C} p_i(y), with C the cluster of x_i. After the first
rejection the next token is drawn from norm([p_i - q_i]+), after the last acceptance from p.
Dynamic clusters (`grouped`): the tokens at most size // 2 ranks from x in the order of p. Tokens with
|p(y) - p(x)| > max_gap, or with a squared embedding distance from x above max_distance, are excluded. x is always
included.
Fixed clusters (`grouped_static`): a partition of the vocabulary. After a rejection the cluster is drawn from
norm([P_C - Q_C]+), and the token from p within it.
Guarantee: lossy. With fixed clusters the distribution of the clusters is exact, and that of the tokens is not. With
dynamic clusters neither is exact. size < 2, or clusters of one token, is the standard rule.
Cost: the dynamic rule sorts the vocabulary at every position, one sort of [L, V] per step.
Deviations: the window is symmetric and clipped at both ends. (The released code takes 7 tokens below and 6 above, and
tests the 7 least probable tokens alone.) Equal probabilities are ranked by id. A token that p cannot draw belongs to no
other token's cluster and has no cluster itself. So at temperature 0 the rule is greedy verification, and under top-k
the rank of tokens without mass has no effect. Embeddings cover the complete vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.types import Array, TokenTree
from specjax.verifiers.exact.standard import chain_logits, chain_path, residual_of_chain
from specjax.verifiers.verifier import (
    Accepted,
    Verifier,
    check_parameter,
    distribution,
    normalise,
    with_keys_and_params,
)


def core(
    u: Array,
    tree: TokenTree,
    target_logits: Array,
    max_gap: Array,
    embeddings: Array | None = None,
    max_distance: Array | float = jnp.inf,
    *,
    size: int,
) -> Accepted:
    """Apply the dynamic rule with given uniforms float32[B, N]. `tree` is a chain, and u[:, 0] is not used."""
    draft_logits = chain_logits(tree, target_logits.shape[-1])
    ids, member = window(target_logits[:, :-1], tree.tokens[:, 1:], size)
    p, q = (_probability(x[:, :-1], ids) for x in (target_logits, draft_logits))  # float32[B, L, 2h + 1]
    x = slice(size // 2, size // 2 + 1)  # the drafted token in its window
    keep = (p > 0) & (p[:, :, x] > 0) & (jnp.abs(p - p[:, :, x]) <= max_gap)
    if embeddings is not None:
        difference = (embeddings[ids] - embeddings[ids[:, :, x]]).astype(jnp.float32)
        keep &= jnp.sum(jnp.square(difference), -1) <= max_distance
    member &= keep.at[:, :, x].set(True)
    mass = lambda x: jnp.sum(jnp.where(member, x, 0.0), -1)
    num_nodes = _num_accepted(u, tree, mass(p), mass(q), q[:, :, size // 2])
    last = num_nodes - 1
    remaining = residual_of_chain(tree._replace(logits=draft_logits), last, distribution(target_logits, last))
    return Accepted(chain_path(num_nodes, u.shape[1]), num_nodes, remaining)


def window(logits: Array, token: Array, size: int) -> tuple[Array, Array]:
    """Return the tokens within h = size // 2 ranks of `token` [B, L]: int32[B, L, 2h + 1], with the token itself at h.

    The second result is a bool array of this shape. It is true where a token of that rank exists.
    """
    half = size // 2
    if not half:
        return token[:, :, None], jnp.ones((*token.shape, 1), bool)
    vocab = logits.shape[-1]
    logit = jnp.take_along_axis(logits, token[:, :, None], 2)
    precedes = (logits > logit) | ((logits == logit) & (jnp.arange(vocab) < token[:, :, None]))
    rank = jnp.sum(precedes, -1, keepdims=True) + jnp.arange(-half, half + 1)
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ids = take_along(order, jnp.clip(rank, 0, vocab - 1), 2)
    return ids.astype(jnp.int32), (rank >= 0) & (rank < vocab)


def core_static(u: Array, tree: TokenTree, target_logits: Array, clusters: Array) -> Accepted:
    """Apply the rule of a fixed partition `clusters` int32[V] with given uniforms. `tree` is a chain."""
    draft_logits = chain_logits(tree, target_logits.shape[-1])
    same = clusters == clusters[tree.tokens[:, 1:]][:, :, None]  # bool[B, L, V]
    p, q = (jnp.sum(distribution(x[:, :-1]) * same, -1) for x in (target_logits, draft_logits))
    q_x = _probability(draft_logits[:, :-1], tree.tokens[:, 1:, None])[:, :, 0]
    num_nodes = _num_accepted(u, tree, p, q, q_x)
    last = num_nodes - 1
    p, q = distribution(target_logits, last), distribution(draft_logits, last)
    q = jnp.where((num_nodes < jnp.sum(tree.valid, 1))[:, None], q, 0.0)  # no draft at the end of the chain
    p_c, q_c = (jnp.zeros_like(x).at[:, clusters].add(x) for x in (p, q))  # float32[B, V], by cluster
    share = normalise(jnp.maximum(p_c - q_c, 0.0), p_c) / jnp.where(p_c > 0, p_c, 1.0)
    return Accepted(chain_path(num_nodes, u.shape[1]), num_nodes, p * share[:, clusters])


def _probability(logits: Array, ids: Array) -> Array:
    """Return the probabilities float32[B, L, M] of tokens `ids` [B, L, M] under rows [B, L, V]."""
    logit = jnp.take_along_axis(logits, ids, 2)
    return jnp.where(logit > -jnp.inf, jnp.exp(logit - jax.nn.logsumexp(logits, -1, keepdims=True)), 0.0)


def _num_accepted(u: Array, tree: TokenTree, p: Array, q: Array, q_x: Array) -> Array:
    """Return the number int32[B] of accepted nodes, root included.

    Args:
      p, q: masses [B, L] of the clusters. q_x: masses [B, L] of the tokens.
    """
    ok = tree.valid[:, 1:] & (q_x > 0) & (u[:, 1:] * q < p)
    return 1 + jnp.sum(jnp.cumprod(ok, 1, dtype=jnp.int32), 1)


def grouped(
    size: int = 10,
    *,
    max_gap: Array | float = jnp.inf,
    embeddings: Array | None = None,
    max_distance: Array | float = jnp.inf,
) -> Verifier:
    """Build the rule with dynamic clusters of up to 2 (size // 2) + 1 tokens. All arguments except `size` are leaves.

    Args:
      size: G, the number of other tokens in a cluster, rounded down to even. The paper reports 3, 25 and 50.
      max_gap: largest |p(y) - p(x)| in a cluster; 0.15 in the released code.
      embeddings: [V, D], compared only if given.
      max_distance: largest squared distance to x; 0.5 in the released code.

    Raises: UsageError for a negative value.
    """
    for name, value in (("size", size), ("max_gap", max_gap), ("max_distance", max_distance)):
        check_parameter(f"grouped: {name}", value, lambda x: x >= 0, "at least 0")
    params: tuple = (jnp.asarray(max_gap, jnp.float32),)
    if embeddings is not None:
        params += (jnp.asarray(embeddings), jnp.asarray(max_distance, jnp.float32))
    return Verifier("grouped", _rule(size), params=params, greedy_at_zero=True, **_FACTS)


def grouped_static(clusters: Array) -> Verifier:
    """Build the rule with fixed clusters. `clusters` int32[V] is the cluster number of each token, below V.

    Raises: UsageError for other numbers.
    """
    fits = lambda x: (x.ndim == 1) & (x >= 0) & (x < x.size)
    check_parameter("grouped_static: clusters", clusters, fits, "one number from 0 to V - 1 for each of V tokens")
    return Verifier("grouped_static", _static_rule, params=(jnp.asarray(clusters, jnp.int32),), **_FACTS)


_FACTS: dict = {
    "draws": ("chain",),
    "guarantee": "lossy",
    "summary": "tests a drafted token as a member of its cluster, for image tokens",
    "paper": "So et al. 2025, arXiv 2508.07747",
}


@functools.cache  # equal sizes give the same rule, so that nothing is recompiled
def _rule(size: int):
    return with_keys_and_params(functools.partial(core, size=size))


_static_rule = with_keys_and_params(core_static)
