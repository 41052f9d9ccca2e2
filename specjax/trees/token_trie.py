"""Tries of drafted continuations: equal prefixes become one node, and the heaviest nodes stay.

He, Zhong, Cai, Lee, He: REST: Retrieval-Based Speculative Decoding (NAACL 2024), arXiv 2311.08252, section 3.2, builds
its trees this way. Every drafter that proposes complete continuations can use it.

Rule: the weight of a prefix is the sum of the weights of the paths that begin with it. A prefix is at least as heavy as
its extensions, so the heaviest prefixes form a tree.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.types import Array, TokenTree


def from_paths(root: Array, paths: Array, weights: Array, num_nodes: int) -> TokenTree:
    """Return the trie of `paths` below `root`, cut to its `num_nodes - 1` heaviest prefixes.

    Among equal weights the shorter prefix stays, then the one with smaller token ids, compared from the front. After
    the root, nodes are ordered by decreasing weight. So parents precede children, heavy siblings precede light ones,
    and valid nodes precede invalid ones.

    Args:
      root: int32[B], the last committed token.
      paths: int32[B, R, D], continuations of the root; a path ends before its first negative token.
      weights: [B, R], above 0; paths with other weights are dropped. Sums are float32, exact for counts below 2**24.
      num_nodes: N, root included.

    Returns: a point-mass TokenTree of N nodes.

    Cost: a sort of R paths and R^2 D additions per row.
    """
    batch, count, depth = paths.shape
    weights = weights.astype(jnp.float32)
    paths, weights = _sort_paths(jnp.where((weights > 0)[:, :, None], paths, -1), weights)
    first = _first_of_prefix(paths)  # int32[B, R, D]
    is_member = first[:, None] == jnp.arange(count)[:, None, None]  # bool[B, leader, R, D]
    # All sums add R numbers in the same order, some of them 0, so a prefix is never lighter than its extension.
    total = jnp.sum(jnp.where(is_member, weights[:, None, :, None], 0.0), 2)  # [B, R, D]; 0 except at leaders
    total = jnp.where(paths >= 0, total, 0.0)

    k = min(num_nodes - 1, count * depth)
    by_depth = lambda x: x.swapaxes(1, 2).reshape(batch, -1)  # [B, D * R]: shorter prefixes first
    best, place = jax.lax.top_k(by_depth(total), k)  # ties go to the earlier one
    tokens = take_along(by_depth(paths), place, 1)
    parent_place = jnp.pad(first, ((0, 0), (0, 0), (1, 0)))[:, :, :-1] + count * (jnp.arange(depth) - 1)
    parent_place = take_along(by_depth(parent_place), place, 1)
    parent = jnp.sum(jnp.where(place[:, None, :] == parent_place[:, :, None], 1 + jnp.arange(k), 0), 2)  # root: 0
    valid = best > 0
    fill = lambda x, at_root: jnp.concatenate(
        [at_root[:, None], x, jnp.zeros((batch, num_nodes - 1 - k), x.dtype)], 1, dtype=x.dtype
    )
    return TokenTree(
        tokens=fill(jnp.where(valid, tokens, 0).astype(jnp.int32), root),
        parents=fill(jnp.where(valid, parent, 0).astype(jnp.int32), jnp.full_like(root, -1)),
        valid=fill(valid, jnp.ones_like(root, bool)),
    )


def _sort_paths(paths: Array, weights: Array) -> tuple[Array, Array]:
    """Sort the paths of each row in lexicographic order together with their weights.

    Entries from a path's end on are -1.
    """
    depth = paths.shape[2]
    paths = jnp.where(jnp.cumsum(paths < 0, 2) > 0, -1, paths)
    columns = [paths[:, :, d] for d in range(depth)]
    # The weights are a sort key too, so sums do not depend on the order of the input paths.
    *columns, weights = jax.lax.sort((*columns, weights), dimension=1, num_keys=depth + 1)
    return jnp.stack(columns, 2), weights


def _first_of_prefix(paths: Array) -> Array:
    """Return int32[B, R, D]: the first of the sorted paths that begins with the same d + 1 tokens."""
    same = jnp.cumprod(paths[:, 1:] == paths[:, :-1], 2).astype(bool)  # equal to the previous path
    starts = jnp.pad(~same, ((0, 0), (1, 0), (0, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(starts, jnp.arange(paths.shape[1])[:, None], 0), axis=1)
