"""Trees of fixed shape: branching specs, RSD-C, Sequoia's and Medusa's shapes, and independent paths.

RSD-C: Jeon et al., Recursive Speculative Decoding (2024), arXiv 2402.14160. The children of a node are the tokens with
the largest log q + Gumbel noise: a sample without replacement, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import first_largest, take_along
from specjax.errors import UsageError
from specjax.numerics.validation import MAX_NODES
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.trees.contracts import Builder, Level, Parents, Stop, exclude, noise, verify_widths, with_stop
from specjax.trees.templates import Template, branching_paths
from specjax.types import Array, Draws

How = Literal[
    "without_replacement", "with_replacement", "top_and_sampled", "point_mass", "without_replacement_then_uniform"
]

SUPPORT = 1e-35
"""Tokens of smaller probability count as impossible in `without_replacement_then_uniform`."""


def branching(spec: str | Sequence[int], draws: How = "without_replacement") -> Builder:
    """Return the tree of a spec: `"4x2x1"` or (4, 2, 1) has four nodes on level 1, each with two children, and so on.

    Args:
      draws: the way to draw siblings. `without_replacement` is RSD-C. `without_replacement_then_uniform` is Sequoia's
        rule for distributions with fewer tokens than children. `point_mass` takes the likeliest tokens.

    Raises: UsageError for a spec of any other form.
    """
    try:
        widths = tuple(int(w) for w in spec.split("x")) if isinstance(spec, str) else tuple(spec)
    except ValueError:
        raise UsageError(f'a branching spec is numbers joined by x, such as 4x2x1, not "{spec}"') from None
    if not widths or min(widths) < 1:
        raise UsageError(f"a branching spec needs one number of at least 1 per level, not {spec}")
    return static(branching_paths(widths), draws)


def chain(num_tokens: int, *, stop: Stop | None = None) -> Builder:
    """Return a chain of `num_tokens` tokens, or fewer if the stop condition `stop` ends it."""
    return with_stop(branching((1,) * num_tokens), stop)


def independent_paths(paths: int, depth: int) -> Builder:
    """Return `paths` chains of `depth` tokens drawn independently, as in SpecTr and multi-path verification.

    Raises: UsageError for a number below 1.
    """
    if min(paths, depth) < 1:
        raise UsageError(f"paths and depth must be at least 1, not {paths} and {depth}")
    return branching((paths, *(1,) * (depth - 1)), "with_replacement")


@functools.cache
def static(paths: tuple[tuple[int, ...], ...], draws: How = "without_replacement") -> Builder:
    """Return the tree of rank paths; see `specjax.trees.templates.Template`."""
    template = Template(paths)
    shape = _tables(template)
    max_children = int(shape.counts.max())

    def expand(state, level, parents: Parents):
        row, rank, valid, feed, counts = (jnp.asarray(t)[level] for t in shape[:5])
        batch, num_parents = parents.ids.shape
        counts = jnp.broadcast_to(counts[:num_parents], (batch, num_parents))
        children, exists, excluded = _draw_children(draws, parents, max_children, counts)
        parent_index = jnp.broadcast_to(row, (batch, len(row)))
        at = lambda x: take_along(x, parent_index, 1)
        flat = lambda x: take_along(x.reshape(batch, -1), parent_index * children.shape[2] + rank, 1)
        is_node = valid & at(parents.valid) & (rank < children.shape[2]) & flat(exists)
        feed = jnp.broadcast_to(feed, (batch, len(feed)))
        return state, Level(flat(children), at(parents.ids), is_node, feed, excluded)

    def finish(state, parents, valid):
        return jnp.broadcast_to(jnp.asarray(shape.ids), (parents.shape[0], template.num_nodes))

    draw_kind: Draws = draws
    if template.num_nodes == template.max_depth + 1 and draws != "point_mass":
        draw_kind = "chain"
    elif draws == "with_replacement" and not _is_even(template):
        draw_kind = "with_replacement_uneven"
    return Builder(
        init=lambda batch: (),
        expand=expand,
        finish=finish,
        num_nodes=template.num_nodes,
        max_depth=template.max_depth,
        width=shape.row.shape[1],
        frontier=shape.feed.shape[1],
        levels=template.max_depth,
        draws=draw_kind,
        widths=verify_widths([end for _, end in template.levels]),
        excludes=max_children if draws == "top_and_sampled" else 0,
    )


def make_builder(
    num_tokens: int, tree: Builder | None, stop: Stop | None, keep_logits: bool = False, keep_confidence: bool = False
) -> Builder:
    """Return the builder for the settings that drafters with a model share.

    Raises: UsageError for a num_tokens below 1 or above `MAX_NODES`.
    """
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if num_tokens > MAX_NODES:
        raise UsageError(f"num_tokens must be at most {MAX_NODES}, not {num_tokens}")
    builder = tree or chain(num_tokens)
    if stop is None and not keep_logits and not keep_confidence:
        return builder
    keep_logits = keep_logits or builder.keep_logits
    return with_stop(builder, stop or builder.stop, keep_logits=keep_logits, keep_confidence=keep_confidence)


def _draw_children(draws: How, parents: Parents, count: int, counts: Array) -> tuple[Array, Array, Array | None]:
    """Draw `count` children of each parent: tokens int32[B, F, count], their existence, and the excluded tokens.

    Args:
      counts: int32[B, F], number of these children that each parent uses (`top_and_sampled` depends on it).
    """
    size = min(count, parents.vocab_size)
    if parents.keys is None or parents.coupled:
        draws = "point_mass" if draws == "point_mass" else "without_replacement"  # equal siblings would be wasted
    if draws in ("point_mass", "without_replacement"):
        tokens, scores = parents.best(size, noisy=draws != "point_mass")
        return tokens, scores > -jnp.inf, None
    race = {
        "with_replacement": _draw_with_replacement, "top_and_sampled": _draw_one_beside_the_top,
        "without_replacement_then_uniform": _draw_beyond_support,
    }[draws]  # fmt: skip
    drawn = parents.reduce(lambda log_q, keys, counts: race(log_q, keys, counts, size), counts)
    likeliest, scores = parents.best(size, noisy=False)
    excluded = None
    if draws == "top_and_sampled":
        fixed = jnp.where(jnp.arange(size) < counts[:, :, None] - 1, likeliest, parents.vocab_size)
        excluded = jnp.pad(fixed, ((0, 0), (0, 0), (0, count - size)), constant_values=parents.vocab_size)
    return *parents.unless_greedy(drawn, (likeliest, scores > -jnp.inf)), excluded


def _draw_with_replacement(log_q: Array, keys: Array, counts: Array, size: int) -> tuple[Array, Array]:
    """Draw independent children of each parent from log_q float32[B, F, V]: tokens [B, F, size], and their existence.

    Args: keys: [B, F]. counts: see `_draw_children`.
    """
    tokens = [first_largest(log_q + noise(keys, log_q.shape[-1], race)) for race in range(size)]
    return jnp.stack(tokens, -1), jnp.ones((*counts.shape, size), bool)


def _draw_one_beside_the_top(log_q: Array, keys: Array, counts: Array, size: int) -> tuple[Array, Array]:
    """Draw one token from all but the counts - 1 likeliest tokens. It comes first, and these follow."""
    top, values = gumbel_topk(None, log_q, size)
    slot = jnp.where(jnp.arange(size) < counts[:, :, None] - 1, top, log_q.shape[-1])
    remaining = exclude(log_q, slot)
    sampled = first_largest(remaining + noise(keys, log_q.shape[-1]))[:, :, None]
    exists = jnp.concatenate([jnp.max(remaining, -1, keepdims=True), values[:, :, : size - 1]], -1) > -jnp.inf
    return jnp.concatenate([sampled, top[:, :, : size - 1]], -1), exists


def _draw_beyond_support(log_q: Array, keys: Array, counts: Array, size: int) -> tuple[Array, Array]:
    """Draw children as `Parents.best` does, followed by the tokens without mass in random order."""
    supported = log_q > jnp.log(SUPPORT)
    tokens, scores = gumbel_topk(keys, jnp.where(supported, log_q, -jnp.inf), size)
    # The noise of these tokens has not been used yet.
    extra, extra_scores = gumbel_topk(keys, jnp.where(supported, -jnp.inf, 0.0), size)
    rank = jnp.arange(size) - jnp.sum(scores > -jnp.inf, -1, keepdims=True)
    take = lambda x: take_along(x, jnp.maximum(rank, 0), -1)
    return jnp.where(rank < 0, tokens, take(extra)), (rank < 0) | (take(extra_scores) > -jnp.inf)


class _Tables(NamedTuple):
    """A template as arrays per level, padded to the widest level (W) and the largest frontier (F)."""

    row: np.ndarray  # int32[levels, W], index of the parent in the frontier
    rank: np.ndarray  # int32[levels, W], rank among the siblings
    valid: np.ndarray  # bool[levels, W]
    feed: np.ndarray  # int32[levels, F], slots of the inner nodes
    counts: np.ndarray  # int32[levels, F], number of children of each parent
    ids: np.ndarray  # int32[N], node numbers of the template's nodes during growth


def _is_even(template: Template) -> bool:
    """Return True if the chains of first children below the root's children all have the same length."""
    depth_below = np.zeros(template.num_nodes, np.int32)
    for node in range(template.num_nodes - 1, 0, -1):  # the first sibling comes last
        depth_below[template.parents[node]] = 1 + depth_below[node]
    return len(set(depth_below[template.parents == 0])) == 1


def _tables(template: Template) -> _Tables:
    parents = template.parents
    inner = [[n for n in range(*level) if n in set(parents.tolist())] for level in template.levels]
    depth = template.max_depth
    w = max(stop - start for start, stop in template.levels[1:])
    f = max(1, *(len(nodes) for nodes in inner))
    row, rank, valid, feed, counts = (np.zeros((depth, size), np.int32) for size in (w, w, w, f, f))
    tables = _Tables(row, rank, valid, feed, counts, np.zeros(template.num_nodes, np.int32))
    for level, (start, stop) in enumerate(template.levels[1:]):
        for slot, node in enumerate(range(start, stop)):
            tables.row[level, slot] = inner[level].index(parents[node])
            tables.rank[level, slot] = template.ranks[node]
            tables.valid[level, slot] = 1
            tables.ids[node] = 1 + level * w + slot
        tables.feed[level, : len(inner[level + 1])] = [n - start for n in inner[level + 1]]
        tables.counts[level, : len(inner[level])] = [int((parents == n).sum()) for n in inner[level]]
    return tables._replace(valid=tables.valid.astype(bool))
