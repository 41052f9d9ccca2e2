"""TAPS: the best prefixes of a block drafter by acceptance rates that depend on the path, fitted to earlier outcomes.

TAPS (2026), arXiv 2606.00487. Only its abstract was read, so this is our form of its idea.

Rule: marginal distributions q_d overstate the nodes below a prefix that will be rejected. The value of a node is the
product, down its path, of the estimated acceptance rate of each node given that its parent is accepted,
  c = sigmoid(logit q_d[r] + w . f), with features f of the node and its parent (`FEATURES`).
The tree consists of the `total` nodes with the largest values. A child is worth less than its parent, so parents are
always in the tree. With w = 0 the values are those of `ddtree`.
Guarantee: that of `ddtree`, a point-mass tree for verification by matching. w may be any function of earlier steps.
Deviations: the estimator and its features are ours. A node has at most CHILDREN children.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.trees.builders.ddtree import best_nodes, likeliest_ranks
from specjax.trees.contracts import Builder, Level, Parents, verify_widths
from specjax.types import Array

FEATURES = (
    "bias", "logit", "rank", "gap", "depth", "recent", "parent's logit", "parent's rank", "rank of the parent",
)  # fmt: skip
"""Features of a node: 1, its logit, log(1 + rank), the gap of the two likeliest tokens and its depth; the recent
acceptance of the likeliest token there; the parent's logit and log(1 + rank), and whether both ranks are equal."""
CHILDREN = 16
"""Largest number of children of a node."""
SURE = 16.0
"""Largest absolute logit of a probability."""


class PathWeights(NamedTuple):
    """Weights of the features, and the recent acceptance by depth, from earlier outcomes."""

    weights: Array  # float32[FEATURES]
    recent: Array  # float32[levels], recent acceptance of the likeliest token by depth


class PathDetails(NamedTuple):
    """The inputs of the estimates of nodes."""

    features: Array  # float32[B, N, FEATURES]
    logit: Array  # float32[B, N], of q


class _Paths(NamedTuple):
    learned: PathWeights
    scores: Array  # float32[B, levels * N], of all candidates
    details: PathDetails  # of all candidates
    reach: Array  # float32[B, N], log value of each prefix of the previous depth
    nodes: Array  # int32[B, N], their node numbers
    rank: Array  # int32[B, N]
    logit: Array  # float32[B, N]


def initial_weights(levels: int) -> PathWeights:
    """Return weights with which the values are those of `ddtree`."""
    return PathWeights(jnp.zeros(len(FEATURES)), jnp.full(levels, 0.5))


def estimate(details: PathDetails, weights: Array) -> Array:
    """Return the logits float32[...] of acceptance rates given the parent."""
    return jnp.clip(details.logit + details.features @ weights, -SURE, SURE)


def with_weights(builder: Builder, learned: PathWeights) -> Builder:
    """Return `builder` with these weights, which may be traced."""
    return replace(builder, init=lambda batch: builder.init(batch)._replace(learned=learned))


@functools.cache
def path_ddtree(total: int = 15, depth: int | None = None, *, children: int = CHILDREN) -> Builder:
    """Return a builder of the `total` nodes with the largest values, at most `depth` deep (default: 16).

    A drafter of heads replaces its weights, which are 0, by those that it has fitted (`with_weights`).

    Raises: UsageError for a number below 1.
    """
    if min(total, children, 1 if depth is None else depth) < 1:
        raise UsageError(
            f"the numbers of nodes, levels and children must be at least 1, not {total}, {depth}, {children}"
        )
    levels = min(total, depth or 16)
    candidates = levels * total

    def init(batch: int) -> _Paths:
        empty = jnp.full((batch, total), -jnp.inf).at[:, 0].set(0.0)
        none = jnp.zeros((batch, total), jnp.int32)
        details = PathDetails(jnp.zeros((batch, candidates, len(FEATURES))), jnp.zeros((batch, candidates)))
        scores = jnp.full((batch, candidates), -jnp.inf)
        return _Paths(initial_weights(levels), scores, details, empty, none, none, jnp.zeros((batch, total)))

    def expand(state: _Paths, level, parents: Parents):
        k = min(total, children, parents.vocab_size)
        ranks = likeliest_ranks(parents, k)
        details = _details(state, level, ranks.log_q)  # [B, N, k]
        log_rate = jax.nn.log_sigmoid(estimate(details, state.learned.weights))
        exists = parents.valid & (ranks.log_q > -jnp.inf)
        values = state.reach[:, :, None] + jnp.where(exists[:, None], log_rate, -jnp.inf)
        reach, pick = jax.lax.top_k(values.reshape(len(values), -1), total)
        prefix, rank = pick // k, pick % k
        at = lambda x, index: take_along(x, index, 1)
        details_of_level = jax.tree.map(lambda x: _take_pairs(x, pick), details)
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, level * total, 1)
        drafted = Level(
            at(ranks.tokens, rank), at(state.nodes, prefix), reach > -jnp.inf, jnp.zeros((len(values), 1), jnp.int32)
        )
        numbers = jnp.broadcast_to(1 + level * total + jnp.arange(total), rank.shape)
        scores, stored = write(state.scores, reach), jax.tree.map(write, state.details, details_of_level)
        return _Paths(state.learned, scores, stored, reach, numbers, rank, details_of_level.logit), drafted

    def finish(state: _Paths, parents, valid):
        return best_nodes(state.scores, total)

    return Builder(
        init=init,
        expand=expand,
        finish=finish,
        num_nodes=total + 1,
        max_depth=levels,
        width=total,
        frontier=1,
        levels=levels,
        draws="point_mass",
        widths=verify_widths(range(1, total + 2)),
        warped=False,
        shorten=lambda deepest: path_ddtree(total, min(levels, deepest), children=children),
        details=lambda state: state.details,
    )


def _details(state: _Paths, level: Array, log_q: Array) -> PathDetails:
    """Return the inputs of the estimates of all pairs of N prefixes and k ranks: arrays [B, N, k, ...]."""
    size, (batch, k) = state.reach.shape[1], log_q.shape
    logit = jnp.clip(log_q - jnp.log(-jnp.expm1(jnp.minimum(log_q, -1e-7))), -SURE, SURE)
    rank = jnp.arange(k)
    lead = log_q[:, 0] - log_q[:, 1] if k > 1 else jnp.zeros(batch)
    has_parent = (level > 0).astype(jnp.float32)
    per_row = lambda x: x[:, None, None]
    columns = (
        jnp.ones(()), logit[:, None] / 4, jnp.log1p(rank), per_row(jnp.clip(lead, 0, SURE) / 4), level / 4,
        state.learned.recent[level] - 0.5, has_parent * state.logit[:, :, None] / 4,
        has_parent * jnp.log1p(state.rank)[:, :, None], has_parent * (state.rank[:, :, None] == rank),
    )  # fmt: skip
    shape = batch, size, k
    features = jnp.stack([jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in columns], -1)
    return PathDetails(features, jnp.broadcast_to(logit[:, None], shape))


def _take_pairs(x: Array, pick: Array) -> Array:
    """Return the entries of x [B, N, k, ...] at flat pairs int32[B, N]."""
    flat = x.reshape(x.shape[0], -1, *x.shape[3:])
    return take_along(flat, pick.reshape(*pick.shape, *[1] * (flat.ndim - 2)), 1)
