"""The nodes that `auto` drafts, and the class of each node by facts that are known before the target pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specjax.arrays.indexing import take_along
from specjax.drafters.combined import noisy_ranks
from specjax.drafters.lookup.suffix import find
from specjax.drafters.tables.token_recycling import RANKS, SuccessorLookup, recycled_tree
from specjax.retrieval.rollouts import likeliest_copy
from specjax.retrieval.suffixes import copied_chain, copyable_text
from specjax.trees.growing import GrownTree
from specjax.trees.node_statistics import Drafted, DraftShape
from specjax.trees.operations import chain
from specjax.trees.templates import Template
from specjax.types import Array, Context, TokenTree

MATCHES = (1, 2, 3, 4, 6, 9, 16)  # lower bounds of the classes of match lengths
DEPTHS = (1, 2, 3, 5, 9)  # the same for depths of copied tokens
CHANCES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # the same for probabilities of all other tokens
LEVELS = (1, 2, 3)  # the same for depths of recycled tokens
HEAD_LEVELS = (1, 2, 3, 5)  # the same for depths of a head's tokens
COPIED = len(MATCHES) * len(DEPTHS)
RECYCLED = len(CHANCES) * len(LEVELS)
CLASSES = COPIED + RECYCLED + len(CHANCES) * len(DEPTHS)  # the last ones are of tokens that rollouts vote for
HEAD_CLASSES = len(CHANCES) * len(HEAD_LEVELS)


def prior(has_head: bool = False) -> np.ndarray:
    """Return float32[C], the prior acceptance rate of each class."""
    first = np.array([0.25, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9])
    later = np.array([0.5, 0.6, 0.7, 0.75, 0.8, 0.88, 0.92])
    copied = np.stack([first] + [later] * (len(DEPTHS) - 1), 1).reshape(-1)
    edges = np.append(CHANCES, 1.0)
    middle = (edges[1:] + edges[:-1]) / 2
    recycled, head_rates = np.repeat(0.6 * middle, len(LEVELS)), np.repeat(0.8 * middle, len(HEAD_LEVELS))
    voted = np.repeat(0.9 * middle, len(DEPTHS))
    return np.concatenate([copied, recycled, voted, *([head_rates] if has_head else [])]).astype(np.float32)


def without_head(
    shape: DraftShape, template: Template, successors: SuccessorLookup, context: Context, limit: Array,
    texts: Context | None = None,
) -> Drafted:  # fmt: skip
    """Draft without the head: a copied chain, then the recycled tree; the head's nodes stay empty.

    If the target's noise is shared (`context.noise`), the nodes are those that are likely to be drawn with it.

    template: of the recycled tree. texts: the context with rollouts before the text (`retrieval.rollouts.extend`), to
    copy from; None: only the text.
    """
    count, root = shape.copied, context.root
    depth_class = class_of(shape.depth[1 : 1 + count], DEPTHS)
    if texts is None:
        text = copyable_text(context)
        start, match_lengths = find(*text, count, MATCHES[-1], "latest")
        copy = copied_chain(root, *text, start, count, limit)
        copied_class = class_of(match_lengths[:, None], MATCHES) * len(DEPTHS) + depth_class
    else:
        noise = None if context.noise is None else functools.partial(noisy_ranks.noise_at, context, np.arange(count))
        likely = likeliest_copy(texts.tokens, texts.length, count, noise=noise)
        valid = likely.valid & (jnp.arange(count) < limit[:, None])
        copy = chain(jnp.concatenate([root, likely.tokens], 1), jnp.concatenate([jnp.ones_like(root, bool), valid], 1))
        copied_class = COPIED + RECYCLED + class_of(likely.chance, CHANCES) * len(DEPTHS) + depth_class
    runners_up, chance = recycled_nodes(template, successors, context, limit)
    recycled = slice(1 + count, count + runners_up.tokens.shape[1])
    recycled_class = class_of(chance, CHANCES) * len(LEVELS)
    recycled_class += class_of(shape.depth[recycled], LEVELS)
    fill = lambda *parts: jnp.pad(x := jnp.concatenate(parts, 1), ((0, 0), (0, len(shape.parents) - x.shape[1])))
    kind = fill(jnp.zeros_like(root), copied_class, COPIED + recycled_class)
    tokens, valid = fill(copy.tokens, runners_up.tokens[:, 1:]), fill(copy.valid, runners_up.valid[:, 1:])
    return Drafted(tokens, valid, kind, context.length)


def with_head(shape: DraftShape, drafted: Drafted, grown: GrownTree) -> Drafted:
    """Add the head's tree to `drafted`, in its last nodes.

    The head's probability or confidence of a node determines only the class of the node.
    """
    num_others = len(shape.parents) - grown.tree.tokens.shape[1] + 1
    assert grown.chances is not None
    kind = class_of(grown.chances[:, 1:], CHANCES) * len(HEAD_LEVELS) + class_of(shape.depth[num_others:], HEAD_LEVELS)
    replace_last = lambda old, new: jnp.concatenate([old[:, :num_others], new], 1)
    return drafted._replace(
        tokens=replace_last(drafted.tokens, grown.tree.tokens[:, 1:]),
        valid=replace_last(drafted.valid, grown.tree.valid[:, 1:]),
        kind=replace_last(drafted.kind, CLASSES + kind),
    )


def class_of(x: ArrayLike, bounds: Sequence[float]) -> Array:
    """Return int32 like x, the last class with a lower bound of at most x; 0 below all bounds."""
    return jnp.maximum(jnp.sum(jnp.asarray(x)[..., None] >= jnp.asarray(bounds), -1) - 1, 0)


def recycled_nodes(
    template: Template, successors: SuccessorLookup, context: Context, limit: Array
) -> tuple[TokenTree, Array]:
    """Return the recycled tree and the chances float32[B, N - 1] of its nodes without the root."""
    if context.noise is not None and context.sampling.temperature is not None:
        return noisy_ranks.noisy_tree(template, successors, context, limit)
    tree = recycled_tree(template, successors, context, limit)
    return tree, jnp.exp(_log_chance(successors, tree))


def _log_chance(successors: SuccessorLookup, tree: TokenTree) -> Array:
    """Return float32[B, N - 1], the stored log-probability of each node's token after its parent's, without the root.

    Args:
      tree: the result of `recycled_tree`.
    """
    parent = take_along(tree.tokens, tree.parents[:, 1:], 1)
    tokens, log_p = successors.after(parent, np.arange(RANKS)[None])  # [B, N - 1, 8]
    assert log_p is not None
    return jnp.max(jnp.where(tokens == tree.tokens[:, 1:, None], log_p, -jnp.inf), 2)
