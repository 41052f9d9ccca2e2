"""Token trees: depths, ancestors, and operators that cut, order, join and fuse them."""

from __future__ import annotations

import functools
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.types import Array, TokenTree, Verdict

Some = TypeVar("Some", Array, np.ndarray)


def depths(parents: Some) -> Some:
    """Depth of each node of `parents` int32[B, N]; 0 for the root, whose parent is -1."""
    return ancestor_mask(parents).sum(2, dtype=parents.dtype) - 1


def ancestor_mask(parents: Some, valid: Some | None = None, max_depth: int | None = None) -> Some:
    """bool[B, N, N]: node j is node i or one of its ancestors. Rows of invalid nodes hold themselves only.

    max_depth: of the deepest node, if it is known.

    By squaring, log max_depth matrix products, for on an accelerator operations count: jumping up the tree by gathers
    is six times as many (64 nodes by the TPU compiler's schedule, v5e: 9 us instead of 37). On a CPU it is the slower
    of the two, 0.5 ms for 16 rows of 56 nodes instead of 0.1. In numpy where `parents` is.
    """
    node = np.arange(parents.shape[1])
    above = parents[:, :, None] == node
    if valid is not None:
        above = above & valid[:, :, None]
    mask = (above | (node[:, None] == node)).astype(np.float32)
    deepest = len(node) - 1 if max_depth is None else min(max_depth, len(node) - 1)
    for _ in range(max(deepest - 1, 0).bit_length()):
        mask = (mask @ mask).clip(max=1)
    return mask > 0


def chain(tokens: Array, valid: Array, logits: Array | None = None) -> TokenTree:
    """The tree with one child per node; `tokens` int32[B, N] starts with the root."""
    parents = jnp.broadcast_to(jnp.arange(-1, tokens.shape[1] - 1), tokens.shape)
    return TokenTree(tokens, parents, valid, logits)


def compact(tree: TokenTree) -> TokenTree:
    """Move the valid nodes to the front, in order, so that a verify pass can be cut to them."""
    return take(tree, jnp.argsort(~tree.valid, axis=1, stable=True))  # N small integers, not a vocabulary


def by_score(tree: TokenTree, score: Array) -> tuple[TokenTree, Array]:
    """The valid nodes in falling order of `score` float32[B, N], so that every first part is the best of its size.

    A child's score must not exceed its parent's; of equal ones the earlier node comes first. Also the scores in that
    order, 0 for the root and behind the valid nodes.
    """
    drafted = tree.valid & (jnp.arange(tree.tokens.shape[1]) > 0)
    score = jnp.where(drafted, score, 0.0)
    key = jnp.where(drafted, -score, jnp.where(tree.valid, -jnp.inf, jnp.inf))
    order = jnp.argsort(key, axis=1, stable=True)
    return take(tree, order), take_along(score, order, 1)


def take(tree: TokenTree, order: Array) -> TokenTree:
    """Nodes in another order int32[B, N], a permutation with parents before children."""
    place = jnp.argsort(order, axis=1)
    take = lambda x: take_along(x, order, 1)
    parents = take(tree.parents)
    moved = jnp.where(parents < 0, -1, take_along(place, jnp.maximum(parents, 0), 1))
    logits = None if tree.logits is None else take_along(tree.logits, order[:, :, None], 1)
    return TokenTree(take(tree.tokens), moved.astype(tree.parents.dtype), take(tree.valid), logits)


def cut(tree: TokenTree, width: int) -> TokenTree:
    """The first `width` nodes."""
    logits = None if tree.logits is None else tree.logits[:, :width]
    return TokenTree(tree.tokens[:, :width], tree.parents[:, :width], tree.valid[:, :width], logits)


def pad_nodes(tree: TokenTree, num_nodes: int) -> TokenTree:
    """A point-mass tree with invalid nodes behind its own, `num_nodes` in all."""
    more = ((0, 0), (0, num_nodes - tree.tokens.shape[1]))
    return TokenTree(*(jnp.pad(x, more) for x in (tree.tokens, tree.parents, tree.valid)))


def root_alone(root: Array, shapes: TokenTree) -> TokenTree:
    """The empty draft below `root` int32[B, 1], in the shapes of another tree."""
    alone = pad_nodes(chain(root, jnp.ones_like(root, bool)), shapes.tokens.shape[1])
    return alone._replace(logits=None if shapes.logits is None else jnp.zeros(shapes.logits.shape, shapes.logits.dtype))


def emitted(tree: TokenTree, verdict: Verdict) -> Array:
    """int32[B, N]: the accepted drafts, without the root, and the target's own token; then padding."""
    following = jnp.roll(verdict.path, -1, 1)
    drafted = take_along(tree.tokens, jnp.maximum(following, 0), 1)
    accepted = verdict.num_nodes[:, None] - 1
    return jnp.where(jnp.arange(tree.tokens.shape[1]) < accepted, drafted, verdict.next_token[:, None])


def path_to(parents: Array, node: Array) -> tuple[Array, Array]:
    """The nodes from the root down to `node` int32[B], then -1: int32[B, N], and how many: int32[B]."""
    on_path = take_along(ancestor_mask(parents), node[:, None, None], 1)[:, 0]  # bool[B, N]
    order = jnp.argsort(~on_path, axis=1, stable=True).astype(jnp.int32)  # parents stand before children
    count = jnp.sum(on_path, 1, dtype=jnp.int32)
    return jnp.where(jnp.arange(parents.shape[1]) < count[:, None], order, -1), count


def _first_of_path(tree: TokenTree) -> Array:
    """int32[B, N]: of the valid nodes whose path spells the same tokens, the first; invalid nodes name themselves.

    Names for ever longer ends of the paths, as for suffix arrays (Karp, Miller, Rosenberg 1972): the ends of 2 n tokens
    are equal if their last n are, and the n before.
    """
    depth = depths(tree.parents)

    def first_with(*names: Array) -> Array:
        """int32[B, N]: the first node with the same names."""
        same = functools.reduce(jnp.logical_and, (name[:, :, None] == name[:, None, :] for name in names))
        return jnp.argmax(same, 2).astype(jnp.int32)

    node = jnp.broadcast_to(jnp.arange(depth.shape[1]), depth.shape)
    name = jnp.where(tree.valid, first_with(tree.valid, depth, tree.tokens), node)
    above = jnp.maximum(tree.parents, 0)  # 1, 2, 4, ... levels; the root is above itself
    for step in range((depth.shape[1] - 1).bit_length()):
        if step:
            above = take_along(above, above, 1)
        name = first_with(name, take_along(name, above, 1))
    return name


def merge_equal_siblings(tree: TokenTree) -> TokenTree:
    """One node for siblings of the same token, the first; it takes the children of all, in their order."""
    first = _first_of_path(tree)
    parents = jnp.where(tree.parents < 0, -1, take_along(first, jnp.maximum(tree.parents, 0), 1))
    return tree._replace(
        parents=parents.astype(tree.parents.dtype), valid=tree.valid & (first == jnp.arange(first.shape[1]))
    )


def join(*several: TokenTree) -> TokenTree:
    """Point-mass trees below one root, side by side: the nodes of the first, then those of the second without its root.

    Equal paths stay apart; `merge_equal_siblings` makes them one, and then the tree is their union.
    """
    first, *others = several
    tokens, parents, valid = [first.tokens], [first.parents], [first.valid]
    offset = first.tokens.shape[1] - 1
    for tree in others:
        tokens.append(tree.tokens[:, 1:])
        parents.append(jnp.where(tree.parents[:, 1:] > 0, tree.parents[:, 1:] + offset, 0))
        valid.append(tree.valid[:, 1:])
        offset += tree.tokens.shape[1] - 1
    return TokenTree(*(jnp.concatenate(parts, 1) for parts in (tokens, parents, valid)))


def fuse(first: TokenTree, second: TokenTree) -> tuple[TokenTree, Array]:
    """The union of two point-mass trees, the nodes of the first in front; and which node of `join(first, second)` each
    is, int32[B, N].
    """
    joined = join(first, second)
    union = merge_equal_siblings(joined)
    order = jnp.argsort(~union.valid, axis=1, stable=True)
    return take(union, order), order


def keep_likely(drafted: TokenTree, retrieved: TokenTree) -> TokenTree:
    """Of the retrieved paths those whose first token is a child of the root of `drafted` too."""
    child = (drafted.parents == 0) & drafted.valid  # [B, N]
    known = jnp.any((retrieved.tokens[:, :, None] == drafted.tokens[:, None, :]) & child[:, None, :], 2)
    stays = (retrieved.parents != 0) | known
    below = ancestor_mask(retrieved.parents)  # a path stays or goes with its first node
    return retrieved._replace(valid=retrieved.valid & jnp.all(stays[:, None, :] | ~below, 2))
