"""LANTERN: interchangeable tokens lend their probability to a drafted token.

Jang, Park, Yang, Jung, Yun, Kundu, Kim, Yang: LANTERN: Accelerating Visual Autoregressive Models with Relaxed
Speculative Decoding (ICLR 2025), arXiv 2410.03355; the relative bound is that of LANTERN++ (2025), arXiv 2502.06352.

Rule for a child x of a node with r <- p, d <- q: A is the longest prefix of the tokens nearest to x with
sum_{y in A} r(y) <= delta (relative: <= (lambda - 1) r(x)). r^x(x) = r(x) + sum_A r, r^x = 0 on A, and r^x = r
elsewhere.
  accept x if u d(x) < r^x(x), and descend;
  else r <- norm([r^x - d]+), then d(x) <- 0, d <- norm(d); for point masses r <- norm(r^x without x).
If no child is left, the next token is drawn from r.
Guarantee: lossy. Each test uses a distribution within total variation delta of the target's, but the output can be
further away. delta = 0, lambda = 1 or no neighbours is the exact rule: recursive rejection, on a chain the standard
rule.
Without `sample`, it is the greedy mode of the released code: x is accepted if it is the argmax of p^x, and the next
token is argmax p. On a tree, the longest path of such nodes is taken (ties: the larger sum of log p). delta = 0 is then
greedy verification of p. Decode at temperature 1: at 0, p is one-hot and no neighbour has mass to lend.
Deviations: after a rejection only A is removed, while the released code zeroes all k neighbours. The surrogate of a
later sibling is computed from the residual of its predecessors. Chains use the same descent as trees.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import first_largest, take_along
from specjax.errors import UsageError
from specjax.numerics.validation import check_integer
from specjax.types import Array, TokenTree
from specjax.verifiers.descent import descend, rule_for
from specjax.verifiers.lossy.typical import longest_run, node_log_probability
from specjax.verifiers.verifier import Accepted, Verifier, check_parameter, distribution, with_keys_and_params


def core(
    u: Array,
    tree: TokenTree,
    target_logits: Array,
    neighbours: Array,
    bound: Array,
    share: Array,
    offset: Array,
    *,
    sample: bool = True,
) -> Accepted:
    """Apply the rule with given uniforms float32[B, N], for sum_A r <= bound + share r(x). u[:, 0] is not used."""
    if not sample:
        return _greedy(tree, target_logits, neighbours, bound, share, offset)
    relax = lambda r, token: surrogate(r, token, neighbours, bound, share, offset)
    return descend(rule_for(tree)._replace(relax=relax), u, tree, target_logits)


def surrogate(r: Array, token: Array, neighbours: Array, bound: Array, share: Array, offset: Array) -> Array:
    """Return r^x float32[B, V] of distributions r [B, V] and tokens x [B]."""
    near, in_table = _nearest(token, neighbours, offset)  # int32[B, k], bool[B]
    mass = jnp.take_along_axis(r, near, 1)
    r_x = jnp.take_along_axis(r, token[:, None], 1)
    is_lent = in_table[:, None] & (jnp.cumsum(mass, 1) <= bound + share * r_x)
    rows = jnp.arange(r.shape[0])[:, None]
    r = r.at[rows, jnp.where(is_lent, near, r.shape[1])].set(0.0, mode="drop")
    total = r_x + jnp.sum(jnp.where(is_lent, mass, 0.0), 1, keepdims=True)
    return r.at[rows, token[:, None]].set(total)


def _nearest(token: Array, neighbours: Array, offset: Array) -> tuple[Array, Array]:
    """Return the neighbours int32[..., k] of tokens, and bool[...]: True for tokens in the table."""
    count = neighbours.shape[0]
    in_table = (token >= offset) & (token < offset + count)
    return neighbours[jnp.clip(token - offset, 0, count - 1)] + offset, in_table


def _greedy(tree: TokenTree, logits: Array, neighbours: Array, bound: Array, share: Array, offset: Array) -> Accepted:
    """Find the longest path of tokens that are the argmax of p^x, without computing p^x."""
    near, in_table = _nearest(tree.tokens, neighbours, offset)  # int32[B, N, k], bool[B, N]
    parent = jnp.maximum(tree.parents, 0)
    total = take_along(jax.nn.logsumexp(logits, -1), parent, 1)
    best = jnp.exp(take_along(jnp.max(logits, -1), parent, 1) - total)
    log_p = node_log_probability(logits, tree)
    rows = jnp.arange(near.shape[0])[:, None, None]
    mass = jnp.exp(logits[rows, parent[:, :, None], near] - total[:, :, None])  # float32[B, N, k]
    is_lent = in_table[:, :, None] & (jnp.cumsum(mass, 2) <= (bound + share * jnp.exp(log_p))[:, :, None])
    probability = jnp.exp(log_p) + jnp.sum(jnp.where(is_lent, mass, 0.0), 2)
    # If x passes, no token that lends to it is likelier than x.
    path, num_nodes, last = longest_run(tree, probability >= best, log_p)
    p = distribution(logits, last)
    return Accepted(path, num_nodes, jax.nn.one_hot(first_largest(p), p.shape[-1]))


def lantern(
    neighbours: Array,
    delta: Array | float = 0.1,
    *,
    relative: bool = False,
    offset: Array | int = 0,
    sample: bool = True,
) -> Verifier:
    """Build the rule with a table of neighbours. All arguments except `relative` and `sample` are pytree leaves.

    Args:
      neighbours: int32[W, k], the tokens nearest to each of W tokens, nearest first, without the token itself.
      delta: the bound. With `relative`, it is the factor lambda >= 1 by which the probability of x may grow.
      offset: id of the first of the W tokens, for vocabularies with other tokens too. The table counts from 0.
      sample: accept and draw at random. False: accept by argmax, and append the argmax.

    Raises: UsageError for a negative bound, a relative bound below 1, or a negative offset.
    """
    minimum, expected = (1, "at least 1, the factor lambda, and finite") if relative else (0, "at least 0 and finite")
    check_parameter("lantern: delta", delta, lambda x: (x >= minimum) & (x < math.inf), expected)
    check_parameter("lantern: offset", offset, lambda x: x >= 0, "at least 0")
    bound, share = (0.0, delta - 1) if relative else (delta, 0.0)
    return Verifier(
        "lantern",
        _rule(sample),
        draws=("point_mass", "chain", "without_replacement"),
        guarantee="lossy",
        summary="adds the probability of its nearest neighbours to that of a drafted token, for image tokens",
        paper="Jang et al. 2025, arXiv 2410.03355",
        by_row=sample,
        params=(
            jnp.asarray(neighbours, jnp.int32),
            jnp.asarray(bound, jnp.float32),
            jnp.asarray(share, jnp.float32),
            jnp.asarray(offset, jnp.int32),
        ),
    )


BLOCK = 512
"""Codes whose distances to all others exist at a time: 16,384 codes take 32 MB."""


def nearest_codes(codebook: np.ndarray, count: int) -> np.ndarray:
    """Return the codes int32[C, count] nearest to each code of a VQ codebook, nearest first, for `lantern`.

    A code is not its own neighbour. Another code with the same vector is, and equal distances go by number.

    codebook: float[C, D], the vectors of the codes.

    Raises: UsageError for an array of another rank, or a `count` outside of 0 to C - 1.
    """
    vectors = np.asarray(codebook, np.float32)
    if vectors.ndim != 2:
        raise UsageError(
            f"the codebook has the shape {list(vectors.shape)}, which must be [codes, numbers of a vector]"
        )
    codes = len(vectors)
    check_integer("count", count, 0)
    if count >= codes:
        raise UsageError(f"count is {count}, but a code has only {codes - 1} neighbours; lower it")
    nearest = np.empty((codes, count), np.int32)
    for first in range(0, codes, BLOCK):
        block = vectors[first : first + BLOCK]
        distance = np.zeros((len(block), codes), np.float32)
        for x, y in zip(block.T, vectors.T, strict=True):  # exact zeros for equal vectors, unlike a product
            distance += np.square(x[:, None] - y)
        distance[np.arange(len(block)), first + np.arange(len(block))] = np.inf
        nearest[first : first + BLOCK] = np.argsort(distance, 1, kind="stable")[:, :count]
    return nearest


@functools.cache
def _rule(sample: bool):
    return with_keys_and_params(functools.partial(core, sample=sample))
