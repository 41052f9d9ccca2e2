"""RASD: a draft model's tree and retrieved text in one tree, fused by their longest common prefixes.

Quan et al.: RASD: Retrieval-Augmented Speculative Decoding (ACL Findings 2025), arXiv 2503.03434.

Rule: the draft model grows its tree; the retrieved paths that start with a token which the draft model finds likely too
are kept, and what of them is not in the tree already is attached where they leave it.
Guarantee: distribution (a point-mass tree).
Deviations: the authors' details are not published. A retrieved path is kept if its first token is among the children of
the root in the draft tree, which are the draft model's likeliest (`prune=False` keeps all). One retrieved chain is the
default; any drafter without randomness and without a model may stand in for it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specjax import tree as trees
from specjax.drafters.suffix import suffix
from specjax.drafters.two_model import two_model
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.trees import Builder, parse
from specjax.types import Array, Context, Drafter, PyTree, Target, TokenTree


class _State(NamedTuple):
    model: PyTree
    retrieval: PyTree
    origin: Array  # int32[B, N], which node of the draft model's tree each node of the fused one is; 0 for the others


def rasd(
    draft: Target, retrieval: Drafter | None = None, tree: Builder | str = "top:8x2x1x1", *, prune: bool = True
) -> Drafter:
    """The tree of `draft` (a builder without randomness, or its spec) fused with that of `retrieval`.

    Args:
      retrieval: default: `suffix(7)`. prune: keep only paths that start as the draft model would.

    State: that of `two_model` and of the retrieval. After each round the draft model reads as many tokens anew as the
    retrieval may add, for it has not seen those.
    Raises: UsageError for a tree with randomness, or a retrieval that has randomness or a model.
    """
    builder = parse(tree) if isinstance(tree, str) else tree
    retrieval = suffix(7) if retrieval is None else retrieval
    if builder.draws != "point_mass":
        raise UsageError(f"tree must be grown without randomness, such as top:8x2x1x1, but it draws {builder.draws}")
    if retrieval.draws != "point_mass" or not retrieval.follows_any_tree:
        raise UsageError("retrieval must be a drafter without randomness and without a model, such as suffix")
    model = two_model(draft, tree=builder, lag=2 + retrieval.max_depth)
    made = _functions(model.replace(params=()), retrieval.replace(params=()), prune)
    return made.replace(params=(model.params, retrieval.params))


@functools.cache
def _functions(model: Drafter, retrieval: Drafter, prune: bool) -> Drafter:
    nodes = model.num_nodes + retrieval.num_nodes - 1

    def init(params, context: Context) -> _State:
        states = model.init(params[0], context), retrieval.init(params[1], context)
        return _State(*states, jnp.zeros((context.tokens.shape[0], nodes), jnp.int32))

    def propose(params, keys, state: _State, context: Context, limit: Array):
        drafted, of_model = model.propose(params[0], keys, state.model, context, limit)
        retrieved, of_retrieval = retrieval.propose(params[1], keys, state.retrieval, context, limit)
        if prune:
            retrieved = keep_likely(drafted, retrieved)
        fused, order = fuse(drafted, retrieved)
        return fused, _State(of_model, of_retrieval, jnp.where(order < model.num_nodes, order, 0))

    def update(params, state: _State, tree, verdict, output):
        # Nodes that only the retrieval had are behind those of the draft model on every path, and are read anew.
        path = take_along(state.origin, jnp.maximum(verdict.path, 0), 1)
        path = jnp.where(verdict.path < 0, -1, path)
        of_model = model.update(params[0], state.model, tree, verdict._replace(path=path), output)
        of_retrieval = retrieval.update(params[1], state.retrieval, tree, verdict, output)
        return _State(of_model, of_retrieval, state.origin)

    return Drafter(
        init=init,
        propose=propose,
        update=update,
        num_nodes=nodes,
        max_depth=max(model.max_depth, retrieval.max_depth),
        widths=tuple(sorted({w for w in (1, *model.widths, model.num_nodes) if w < nodes})),
    )


def fuse(first: TokenTree, second: TokenTree) -> tuple[TokenTree, Array]:
    """The union of two point-mass trees, the nodes of the first in front; and which node of `trees.join(first, second)`
    each is, int32[B, N].
    """
    joined = trees.join(first, second)
    union = trees.merge_equal_siblings(joined)
    order = jnp.argsort(~union.valid, axis=1, stable=True)
    return trees.take(union, order), order


def keep_likely(drafted: TokenTree, retrieved: TokenTree) -> TokenTree:
    """Of the retrieved paths those whose first token is a child of the root of `drafted` too."""
    child = (drafted.parents == 0) & drafted.valid  # [B, N]
    known = jnp.any((retrieved.tokens[:, :, None] == drafted.tokens[:, None, :]) & child[:, None, :], 2)
    stays = (retrieved.parents != 0) | known
    below = trees.ancestor_mask(retrieved.parents)  # a path stays or goes with its first node
    return retrieved._replace(valid=retrieved.valid & jnp.all(stays[:, None, :] | ~below, 2))
