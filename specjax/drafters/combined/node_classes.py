"""The nodes that `auto` drafts, and the class of each: by what is known of it before the target has seen it."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specjax.arrays.indexing import take_along
from specjax.drafters.lookup.suffix import find
from specjax.drafters.tables.token_recycling import RANKS, Known
from specjax.retrieval.suffixes import copied_chain
from specjax.trees.growing import Grown
from specjax.trees.node_statistics import Drafted, Shape
from specjax.types import Array, Context, TokenTree

MATCHES = (1, 2, 3, 4, 6, 9, 16)  # lower bounds of the classes of match lengths
DEPTHS = (1, 2, 3, 5, 9)  # of depths of copied tokens
CHANCES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of probabilities of all others
LEVELS = (1, 2, 3)  # of depths of recycled tokens
HEAD_LEVELS = (1, 2, 3, 5)  # and of those of a head
COPIED = len(MATCHES) * len(DEPTHS)
CLASSES = COPIED + len(CHANCES) * len(LEVELS)
HEAD_CLASSES = len(CHANCES) * len(HEAD_LEVELS)


def prior(has_head: bool = False) -> np.ndarray:
    """float32[C]: the chance of each class before anything was seen."""
    first = np.array([0.25, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9])
    later = np.array([0.5, 0.6, 0.7, 0.75, 0.8, 0.88, 0.92])
    copied = np.stack([first] + [later] * (len(DEPTHS) - 1), 1).reshape(-1)
    edges = np.append(CHANCES, 1.0)
    said = (edges[1:] + edges[:-1]) / 2
    recycled, of_head = np.repeat(0.6 * said, len(LEVELS)), np.repeat(0.8 * said, len(HEAD_LEVELS))
    return np.concatenate([copied, recycled, *([of_head] if has_head else [])]).astype(np.float32)


def without_head(shape: Shape, runners_up: TokenTree, known: Known, context: Context, limit: Array) -> Drafted:
    """The drafts for the present position: a copied chain, then the recycled tree, and nothing behind."""
    count = shape.copied
    start, matched = find(context.tokens, context.length, count, MATCHES[-1], "latest")
    root = context.root
    copy = copied_chain(root, context.tokens, context.length, start, count, limit)
    of_copy = class_of(matched[:, None], MATCHES) * len(DEPTHS) + class_of(shape.depth[1 : 1 + count], DEPTHS)
    recycled = slice(1 + count, count + runners_up.tokens.shape[1])
    of_rest = class_of(jnp.exp(_log_chance(known, runners_up)), CHANCES) * len(LEVELS)
    of_rest += class_of(shape.depth[recycled], LEVELS)
    fill = lambda *parts: jnp.pad(x := jnp.concatenate(parts, 1), ((0, 0), (0, len(shape.parents) - x.shape[1])))
    kind = fill(jnp.zeros_like(root), of_copy, COPIED + of_rest)
    tokens, valid = fill(copy.tokens, runners_up.tokens[:, 1:]), fill(copy.valid, runners_up.valid[:, 1:])
    return Drafted(tokens, valid, kind, context.length)


def with_head(shape: Shape, drafted: Drafted, grown: Grown) -> Drafted:
    """`drafted` with the head's tree in its last places. What the head says of a node, its probability or its own
    confidence, is only what the node's class is known by."""
    before = len(shape.parents) - grown.tree.tokens.shape[1] + 1
    assert grown.chances is not None
    kind = class_of(grown.chances[:, 1:], CHANCES) * len(HEAD_LEVELS) + class_of(shape.depth[before:], HEAD_LEVELS)
    put = lambda old, new: jnp.concatenate([old[:, :before], new], 1)
    return drafted._replace(
        tokens=put(drafted.tokens, grown.tree.tokens[:, 1:]),
        valid=put(drafted.valid, grown.tree.valid[:, 1:]),
        kind=put(drafted.kind, CLASSES + kind),
    )


def class_of(x: ArrayLike, bounds: Sequence[float]) -> Array:
    """int32 like x: the last class whose lower bound x reaches; 0 below all."""
    return jnp.maximum(jnp.sum(jnp.asarray(x)[..., None] >= jnp.asarray(bounds), -1) - 1, 0)


def _log_chance(known: Known, tree: TokenTree) -> Array:
    """float32[B, N - 1]: how likely the target once found the token of each node, the root apart, after its parent's.

    tree: as `recycled_tree` gives it."""
    parent = take_along(tree.tokens, tree.parents[:, 1:], 1)
    tokens, log_p = known.after(parent, np.arange(RANKS)[None])  # [B, N - 1, 8]
    assert log_p is not None
    return jnp.max(jnp.where(tokens == tree.tokens[:, 1:, None], log_p, -jnp.inf), 2)
