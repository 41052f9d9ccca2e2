"""Operations on token trees: depths, ancestors, cutting, ordering, joining and fusing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import LogitRows
from specjax.types import Array, TokenTree, Verdict

AnyArray = TypeVar("AnyArray", Array, np.ndarray)


def depths(parents: AnyArray) -> AnyArray:
    """Return the depth of each node of `parents` int32[B, N]; 0 for the root, whose parent is -1."""
    return ancestor_mask(parents).sum(2, dtype=parents.dtype) - 1


def ancestor_mask(parents: AnyArray, valid: AnyArray | None = None, max_depth: int | None = None) -> AnyArray:
    """Return bool[B, N, N]: True if node j is node i or one of its ancestors. An invalid node has only itself.

    The mask is squared log2(max_depth) times, because the number of operations counts on an accelerator. Gathers up the
    tree need six times as many: 37 us instead of 9 for 64 nodes, by the TPU compiler's schedule on v5e. On a CPU
    squaring is slower: 0.5 ms instead of 0.1 for 16 rows of 56 nodes. Numpy input gives a numpy result.

    Args:
      max_depth: depth of the deepest node, if it is static.
    """
    node = np.arange(parents.shape[1])
    above = parents[:, :, None] == node
    if valid is not None:
        above = above & valid[:, :, None]
    mask = (above | (node[:, None] == node)).astype(np.float32)
    depth_limit = len(node) - 1 if max_depth is None else min(max_depth, len(node) - 1)
    for _ in range(max(depth_limit - 1, 0).bit_length()):
        mask = (mask @ mask).clip(max=1)
    return mask > 0


def chain(tokens: Array, valid: Array, logits: Array | None = None) -> TokenTree:
    """Return the tree with one child per node. `tokens` int32[B, N] starts with the root."""
    parents = jnp.broadcast_to(jnp.arange(-1, tokens.shape[1] - 1), tokens.shape)
    return TokenTree(tokens, parents, valid, logits)


def compact(tree: TokenTree) -> TokenTree:
    """Move the valid nodes to the front in order, so that a target pass can be cut to them."""
    return reorder(tree, jnp.argsort(~tree.valid, axis=1, stable=True))  # sorts N small integers, not a vocabulary


def sort_by_score(tree: TokenTree, score: Array) -> tuple[TokenTree, Array]:
    """Sort the valid nodes by decreasing `score` float32[B, N], so that every prefix is the best tree of its size.

    A child's score must not exceed its parent's. Among equal scores the earlier node comes first.

    Returns: the tree, and the scores in the new order; 0 for the root and after the valid nodes.
    """
    drafted = tree.valid & (jnp.arange(tree.tokens.shape[1]) > 0)
    score = jnp.where(drafted, score, 0.0)
    key = jnp.where(drafted, -score, jnp.where(tree.valid, -jnp.inf, jnp.inf))
    order = jnp.argsort(key, axis=1, stable=True)
    return reorder(tree, order), take_along(score, order, 1)


def reorder(tree: TokenTree, order: Array) -> TokenTree:
    """Reorder the nodes by `order` int32[B, N], a permutation with parents before children."""
    place = jnp.argsort(order, axis=1)
    move = lambda x: take_along(x, order, 1)
    parents = move(tree.parents)
    moved = jnp.where(parents < 0, -1, take_along(place, jnp.maximum(parents, 0), 1))
    logits = None if tree.logits is None else _map_rows(lambda rows: rows.take(order), tree.logits)
    return TokenTree(move(tree.tokens), moved.astype(tree.parents.dtype), move(tree.valid), logits)


def cut(tree: TokenTree, width: int) -> TokenTree:
    """Return the tree of the first `width` nodes."""
    logits = None if tree.logits is None else _map_rows(lambda rows: rows.cut(width), tree.logits)
    return TokenTree(tree.tokens[:, :width], tree.parents[:, :width], tree.valid[:, :width], logits)


def _map_rows(function: Callable[[LogitRows], LogitRows], logits: Array | LogitRows) -> Array | LogitRows:
    """Apply a function of rows to logits, and return an array for an array."""
    return function(logits) if isinstance(logits, LogitRows) else function(LogitRows(logits)).every()


def pad_nodes(tree: TokenTree, num_nodes: int) -> TokenTree:
    """Append invalid nodes to a point-mass tree, up to a total of `num_nodes`."""
    padding = ((0, 0), (0, num_nodes - tree.tokens.shape[1]))
    return TokenTree(*(jnp.pad(x, padding) for x in (tree.tokens, tree.parents, tree.valid)))


def root_only(root: Array, shapes: TokenTree) -> TokenTree:
    """Return the draft of only `root` int32[B, 1], in the shapes of another tree."""
    tree = pad_nodes(chain(root, jnp.ones_like(root, bool)), shapes.tokens.shape[1])
    zeros = lambda shapes: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return tree._replace(logits=zeros(shapes.logits), confidence=zeros(shapes.confidence))


def emitted_tokens(tree: TokenTree, verdict: Verdict) -> Array:
    """Return int32[B, N]: the accepted tokens without the root, then the target's next token, repeated as padding."""
    next_node = jnp.roll(verdict.path, -1, 1)
    drafted = take_along(tree.tokens, jnp.maximum(next_node, 0), 1)
    accepted = verdict.num_nodes[:, None] - 1
    return jnp.where(jnp.arange(tree.tokens.shape[1]) < accepted, drafted, verdict.next_token[:, None])


def path_to(parents: Array, node: Array) -> tuple[Array, Array]:
    """Return the nodes from the root down to `node` int32[B], then -1: int32[B, N], and their number int32[B]."""
    on_path = take_along(ancestor_mask(parents), node[:, None, None], 1)[:, 0]  # bool[B, N]
    order = jnp.argsort(~on_path, axis=1, stable=True).astype(jnp.int32)  # parents precede children
    count = jnp.sum(on_path, 1, dtype=jnp.int32)
    return jnp.where(jnp.arange(parents.shape[1]) < count[:, None], order, -1), count


def _first_of_path(tree: TokenTree) -> Array:
    """Return int32[B, N]: the first valid node whose path has the same tokens. Invalid nodes map to themselves.

    The method doubles the compared suffix length, as for suffix arrays (Karp, Miller, Rosenberg 1972). Path suffixes of
    2 n tokens are equal if both their last n tokens and the n tokens before them are equal.
    """
    depth = depths(tree.parents)

    def first_with(*names: Array) -> Array:
        """Return int32[B, N]: the first node with the same names."""
        same = functools.reduce(jnp.logical_and, (name[:, :, None] == name[:, None, :] for name in names))
        return jnp.argmax(same, 2).astype(jnp.int32)

    node = jnp.broadcast_to(jnp.arange(depth.shape[1]), depth.shape)
    name = jnp.where(tree.valid, first_with(tree.valid, depth, tree.tokens), node)
    above = jnp.maximum(tree.parents, 0)  # ancestor 1, 2, 4, ... levels up; the root is its own parent
    for step in range((depth.shape[1] - 1).bit_length()):
        if step:
            above = take_along(above, above, 1)
        name = first_with(name, take_along(name, above, 1))
    return name


def merge_equal_siblings(tree: TokenTree) -> TokenTree:
    """Merge siblings of the same token into the first of them, which gets the children of all, in order."""
    first = _first_of_path(tree)
    parents = jnp.where(tree.parents < 0, -1, take_along(first, jnp.maximum(tree.parents, 0), 1))
    return tree._replace(
        parents=parents.astype(tree.parents.dtype), valid=tree.valid & (first == jnp.arange(first.shape[1]))
    )


def join(*trees: TokenTree) -> TokenTree:
    """Join point-mass trees below one root: all nodes of the first, then the others without their roots.

    Equal paths stay separate. `merge_equal_siblings` of the result is the union of the trees.
    """
    first, *later = trees
    tokens, parents, valid = [first.tokens], [first.parents], [first.valid]
    offset = first.tokens.shape[1] - 1
    for tree in later:
        tokens.append(tree.tokens[:, 1:])
        parents.append(jnp.where(tree.parents[:, 1:] > 0, tree.parents[:, 1:] + offset, 0))
        valid.append(tree.valid[:, 1:])
        offset += tree.tokens.shape[1] - 1
    return TokenTree(*(jnp.concatenate(parts, 1) for parts in (tokens, parents, valid)))


def fuse(first: TokenTree, second: TokenTree) -> tuple[TokenTree, Array]:
    """Return the union of two point-mass trees, with the nodes of the first tree in front.

    Returns: the union, and int32[B, N], the index of each node in `join(first, second)`.
    """
    joined = join(first, second)
    union = merge_equal_siblings(joined)
    order = jnp.argsort(~union.valid, axis=1, stable=True)
    return reorder(union, order), order


def keep_likely(drafted: TokenTree, retrieved: TokenTree) -> TokenTree:
    """Keep the retrieved paths whose first token is also a child of the root of `drafted`."""
    child = (drafted.parents == 0) & drafted.valid  # [B, N]
    is_likely = jnp.any((retrieved.tokens[:, :, None] == drafted.tokens[:, None, :]) & child[:, None, :], 2)
    keep = (retrieved.parents != 0) | is_likely
    ancestors = ancestor_mask(retrieved.parents)  # a node stays only if the first node of its path stays
    return retrieved._replace(valid=retrieved.valid & jnp.all(keep[:, None, :] | ~ancestors, 2))
