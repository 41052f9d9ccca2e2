"""Trees from drafted continuations: equal prefixes become one node, and the heaviest stay.

He, Zhong, Cai, Lee, He: REST: Retrieval-Based Speculative Decoding (NAACL 2024), arXiv 2311.08252, section 3.2, builds
its trees so; so does every drafter that comes by whole continuations.

Rule: the weight of a prefix is the sum of the weights of the paths that begin with it. A prefix is at least as heavy as
what extends it, so the heaviest prefixes form a tree.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.types import Array, TokenTree


def from_paths(root: Array, paths: Array, weights: Array, num_nodes: int) -> TokenTree:
    """The trie of `paths` below `root`, cut to its `num_nodes - 1` heaviest prefixes.

    Of equal weights the shorter prefix stays, then the one of smaller token ids (compared from the front). Nodes stand
    in this order: the root, then the heaviest first, so parents come before children, siblings from heavy to light, and
    valid nodes before invalid ones.

    Args:
      root: int32[B], the last committed token.
      paths: int32[B, R, D], continuations of the root; a path ends before its first negative token.
      weights: [B, R], above 0; a path of any other weight is left out. Sums are float32: exact for counts below 2**24.
      num_nodes: N, root included.

    Returns: TokenTree of N nodes, point mass. Cost: a sort of R paths and R^2 D additions per row.
    """
    batch, count, depth = paths.shape
    weights = weights.astype(jnp.float32)
    paths, weights = _sorted(jnp.where((weights > 0)[:, :, None], paths, -1), weights)
    first = _first_of_prefix(paths)  # int32[B, R, D]
    is_member = first[:, None] == jnp.arange(count)[:, None, None]  # bool[B, leader, R, D]
    # All sums add R numbers in the same order, some of them 0: a prefix is never lighter than its extension.
    total = jnp.sum(jnp.where(is_member, weights[:, None, :, None], 0.0), 2)  # [B, R, D]; 0 but for leaders
    total = jnp.where(paths >= 0, total, 0.0)

    k = min(num_nodes - 1, count * depth)
    by_depth = lambda x: x.swapaxes(1, 2).reshape(batch, -1)  # [B, D * R]: shorter prefixes first
    best, chosen = jax.lax.top_k(by_depth(total), k)  # equal weights: the earlier
    tokens = take_along(by_depth(paths), chosen, 1)
    above = jnp.pad(first, ((0, 0), (0, 0), (1, 0)))[:, :, :-1] + count * (jnp.arange(depth) - 1)  # the parent's place
    above = take_along(by_depth(above), chosen, 1)
    parent = jnp.sum(jnp.where(chosen[:, None, :] == above[:, :, None], 1 + jnp.arange(k), 0), 2)  # none: the root
    valid = best > 0
    fill = lambda x, at_root: jnp.concatenate(
        [at_root[:, None], x, jnp.zeros((batch, num_nodes - 1 - k), x.dtype)], 1, dtype=x.dtype
    )
    return TokenTree(
        tokens=fill(jnp.where(valid, tokens, 0).astype(jnp.int32), root),
        parents=fill(jnp.where(valid, parent, 0).astype(jnp.int32), jnp.full_like(root, -1)),
        valid=fill(valid, jnp.ones_like(root, bool)),
    )


def _sorted(paths: Array, weights: Array) -> tuple[Array, Array]:
    """Paths of each row in lexicographic order, -1 from their ends on, with their weights."""
    depth = paths.shape[2]
    paths = jnp.where(jnp.cumsum(paths < 0, 2) > 0, -1, paths)
    columns = [paths[:, :, d] for d in range(depth)]
    # Weights are a key too: sums do not depend on the order in which the paths came.
    *columns, weights = jax.lax.sort((*columns, weights), dimension=1, num_keys=depth + 1)
    return jnp.stack(columns, 2), weights


def _first_of_prefix(paths: Array) -> Array:
    """int32[B, R, D]: the first of the sorted paths that begins with the same d + 1 tokens."""
    same = jnp.cumprod(paths[:, 1:] == paths[:, :-1], 2).astype(bool)  # as the path before
    starts = jnp.pad(~same, ((0, 0), (1, 0), (0, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(starts, jnp.arange(paths.shape[1])[:, None], 0), axis=1)
