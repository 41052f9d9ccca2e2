"""DDTree: the N best prefixes of the distributions that a block drafter returns for each depth, fixed or drawn.

DDTree (2026), arXiv 2604.12989.

Rule: the score of a rank path (r_1 .. r_d) is the sum of log q_k[r_k]. The tree consists of the N best paths. A node of
rank r below the i-th best prefix, both counted from 0, is worse than (i + 1)(r + 1) - 1 others. So only pairs with
(i + 1)(r + 1) <= N are candidates.
JetSpec (2026), arXiv 2606.18394, also limits the children of a node (`children`, `gap`).
`drawn_ddtree` is the form for rules that read q. Siblings are drawn without replacement, and one draw per depth serves
all nodes of that depth. The shape is computed before the draws: a node of rank r has the score sum of log q_k[r_k] over
its ancestors + log(1 - q_d[0] - ... - q_d[r - 1]), the probability that its draw is tested if q is the target's.
Guarantee: `ddtree` returns a point-mass tree, for verification by matching; min(1, p/q) tests would be wrong on it.
`drawn_ddtree` keeps the guarantee of all rules for draws without replacement, because the shape depends on q alone. A
shape that reads the shared draws, such as DySpec's, would bias the text by up to 0.13 with three tokens.
The distribution of a depth serves all of its nodes, so each level feeds one node and stores no logits per node. The
scores of `ddtree` are at temperature 1, for any temperature of the target. Those of `drawn_ddtree` are at the target's
temperature. Greedy rows of `drawn_ddtree` draft the tree of `ddtree`.
Deviation: JetSpec adds all children of a node at once until the budget is used up; here each child has its own score.
Its caps from a histogram of accepted ranks are left out.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.trees.contracts import Builder, Level, Parents, verify_widths
from specjax.types import Array


@functools.cache
def ddtree(
    total: int = 15, depth: int | None = None, *, children: int | None = None, gap: float | None = None
) -> Builder:
    """Return a builder of the `total` best prefixes, at most `depth` deep (default: 16).

    Only heads whose slots do not see each other's tokens can grow it.

    Args:
      children: largest number of children K of a node; JetSpec uses 7. None: as many as are worth it.
      gap: JetSpec's cap of the fan-out where the drafter is sure, in nats. With the gap g between the log
        probabilities of the two likeliest tokens of a depth, its nodes have max(1, round(K sigmoid(gap - g)))
        children. It needs `children`; JetSpec uses 1. None: no such cap.

    Raises: UsageError for a number below 1, or a gap without `children`.
    """
    if children is not None and children < 1:
        raise UsageError(f"children must be at least 1, not {children}")
    if gap is not None and (children is None or not math.isfinite(gap)):
        raise UsageError("gap caps the number of children; give it as a number, together with children")
    return _builder(total, depth, False, children, gap)


@functools.cache
def drawn_ddtree(total: int = 15, depth: int | None = None) -> Builder:
    """Return a builder of `total` drawn nodes in the shape that is best for q. Args and errors: see `ddtree`."""
    return _builder(total, depth, True)


@functools.cache
def ddtree_auto(depth: int | None = None, total: int = 63) -> Builder:
    """Return a builder whose trees the drafter cuts to the size with the most tokens per second.

    The rule is in `specjax.drafters.heads.sized_trees`. `total` is the largest size; the drafter replaces it by that of
    the widest pass of its platform.

    Raises: UsageError for a number below 1.
    """
    shorten = lambda deepest: ddtree_auto(min(depth or deepest, deepest), total)
    return replace(_builder(total, depth, False), scored=True, sized=True, shorten=shorten)


class _Prefixes(NamedTuple):
    scores: Array  # float32[B, levels * N], of all candidates
    reach: Array  # float32[B, N], log probability of each prefix of the previous depth, best first
    nodes: Array  # int32[B, N], their node numbers


@functools.cache
def _builder(
    total: int, depth: int | None, is_drawn: bool, children: int | None = None, gap: float | None = None
) -> Builder:
    if min(total, 1 if depth is None else depth) < 1:
        raise UsageError(f"the number of nodes and the depth must be at least 1, not {total} and {depth}")
    levels = min(total, depth or 16)
    candidates = levels * total
    pairs = np.array([(i, r) for i in range(total) for r in range(total // (i + 1))])

    def init(batch: int) -> _Prefixes:
        empty = jnp.full((batch, total), -jnp.inf).at[:, 0].set(0.0)
        return _Prefixes(jnp.full((batch, candidates), -jnp.inf), empty, jnp.zeros((batch, total), jnp.int32))

    def expand(state: _Prefixes, level, parents: Parents):
        k = min(total, parents.vocab_size, children or total)
        prefix, rank = map(jnp.asarray, pairs[pairs[:, 1] < k].T)
        ranks = (_draw_ranks if is_drawn else likeliest_ranks)(parents, k)
        score = ranks.score if gap is None else _cap(ranks, gap)
        score = jnp.where(parents.valid, score, -jnp.inf)
        best, pick = jax.lax.top_k(state.reach[:, prefix] + score[:, rank], total)
        prefix, rank = prefix[pick], rank[pick]  # [B, N]
        at = lambda x, index: take_along(x, index, 1)
        scores = jax.lax.dynamic_update_slice_in_dim(state.scores, best, level * total, 1)
        reach = jnp.where(best > -jnp.inf, at(state.reach, prefix) + at(ranks.log_q, rank), -jnp.inf)
        reach, order = jax.lax.top_k(reach, total)
        first = jnp.zeros((len(best), 1), jnp.int32)  # any node of the level serves as the next parent
        drafted = Level(at(ranks.tokens, rank), at(state.nodes, prefix), best > -jnp.inf, first)
        return _Prefixes(scores, reach, 1 + level * total + order), drafted

    def finish(state: _Prefixes, parents, valid):
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
        draws="without_replacement" if is_drawn else "point_mass",
        widths=verify_widths(range(1, total + 2)),
        warped=is_drawn,
        shorten=lambda deepest: _builder(total, min(levels, deepest), is_drawn, children, gap),
    )


def best_nodes(scores: Array, total: int) -> Array:
    """Return the root and the `total` best nodes int32[B, 1 + total] by scores float32[B, C]; -1: there is none."""
    best, nodes = jax.lax.top_k(scores, total)  # ties go to the earlier node, so parents precede children
    none = scores.shape[1] + 1
    nodes = jnp.sort(jnp.where(best > -jnp.inf, nodes + 1, none), 1)
    return jnp.pad(jnp.where(nodes == none, -1, nodes), ((0, 0), (1, 0)))


class Ranks(NamedTuple):
    """The k children of each prefix at one depth."""

    tokens: Array  # int32[B, k]
    log_q: Array  # float32[B, k], log of the k largest q, best first
    score: Array  # float32[B, k], log score of a child, given its prefix; it falls with the rank and is >= log_q


def likeliest_ranks(parents: Parents, k: int) -> Ranks:
    """Return the k likeliest tokens of the depth, with their probabilities as scores."""
    tokens, log_q = parents.best(k, noisy=False)  # [B, 1, k]
    log_q = jnp.minimum(log_q[:, 0], 0.0)
    return Ranks(tokens[:, 0], log_q, log_q)


def _cap(ranks: Ranks, gap: float) -> Array:
    """Return the scores of the children that JetSpec's cap leaves, and -inf for the others."""
    size = ranks.score.shape[1]
    lead = ranks.log_q[:, :1] - ranks.log_q[:, 1:2] if size > 1 else jnp.zeros_like(ranks.log_q)
    limit = jnp.maximum(jnp.round(size * jax.nn.sigmoid(gap - lead)), 1)
    return jnp.where(jnp.arange(size) < limit, ranks.score, -jnp.inf)


def _draw_ranks(parents: Parents, k: int) -> Ranks:
    """Draw k tokens. The scores do not depend on them: rank r exists if q has more than r tokens."""
    tokens = parents.best(k)[0][:, 0]
    log_q = likeliest_ranks(parents, k).log_q
    q = jnp.exp(log_q)
    left = jnp.maximum(1 - (jnp.cumsum(q, 1) - q), q)
    score = jnp.where(q > 0, jnp.log(jnp.minimum(left, 1.0)), -jnp.inf)
    return Ranks(tokens, log_q, parents.unless_greedy(score, log_q))
