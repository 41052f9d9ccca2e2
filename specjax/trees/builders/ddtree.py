"""DDTree: the N best prefixes of the distributions that a block drafter returns for each depth.

DDTree (2026), arXiv 2604.12989.

Rule: the score of a rank path (r_1 .. r_d) is the sum of log q_k[r_k]. The tree consists of the N best paths. A node of
rank r below the i-th best prefix, both counted from 0, is worse than (i + 1)(r + 1) - 1 others. So only pairs with
(i + 1)(r + 1) <= N are candidates.
Guarantee: a point-mass tree, for verification by matching; min(1, p/q) tests would be wrong on it.
The distribution of a depth serves all of its nodes, so each level feeds one node and stores no logits per node. The
scores are at temperature 1, for any temperature of the target.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.trees.contracts import Builder, Level, Parents, verify_widths


@functools.cache
def ddtree(total: int = 15, depth: int | None = None) -> Builder:
    """Return a builder of the `total` best prefixes, at most `depth` deep (default: 16).

    Only heads whose slots do not see each other's tokens can grow it.

    Raises: UsageError for a number below 1.
    """
    if min(total, 1 if depth is None else depth) < 1:
        raise UsageError(f"the number of nodes and the depth must be at least 1, not {total} and {depth}")
    levels = min(total, depth or 16)
    candidates = levels * total
    pairs = np.array([(i, r) for i in range(total) for r in range(total // (i + 1))])

    def expand(state, level, parents: Parents):
        scores, best = state  # scores [B, levels * N] of all candidates and [B, N] of the previous depth
        k = min(total, parents.vocab_size)
        prefix, rank = pairs[pairs[:, 1] < k].T
        tokens, log_q = parents.best(k, noisy=False)  # [B, 1, k]
        step = jnp.where(parents.valid, jnp.minimum(log_q[:, 0], 0.0), -jnp.inf)
        best, pick = jax.lax.top_k(best[:, prefix] + step[:, rank], total)
        parent = jnp.where(level > 0, 1 + (level - 1) * total + jnp.asarray(prefix)[pick], 0)
        token = jnp.take_along_axis(tokens[:, 0], jnp.asarray(rank)[pick], 1)
        scores = jax.lax.dynamic_update_slice_in_dim(scores, best, level * total, 1)
        first = jnp.zeros((len(best), 1), jnp.int32)  # the likeliest prefix, whose parent is the one fed before
        return (scores, best), Level(token, parent, best > -jnp.inf, first)

    def finish(state, parents, valid):
        best, nodes = jax.lax.top_k(state[0], total)  # ties go to the earlier node, so parents precede children
        nodes = jnp.sort(jnp.where(best > -jnp.inf, nodes + 1, candidates + 1), 1)
        return jnp.pad(jnp.where(nodes > candidates, -1, nodes), ((0, 0), (1, 0)))

    return Builder(
        init=lambda batch: (
            jnp.full((batch, candidates), -jnp.inf),
            jnp.full((batch, total), -jnp.inf).at[:, 0].set(0.0),
        ),
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
        shorten=lambda deepest: ddtree(total, min(levels, deepest)),
    )
