"""EAGLE-2: expand the likeliest paths, then keep the likeliest nodes.

Li, Wei, Zhang, Zhang: EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (EMNLP 2024),
arXiv 2406.16858.

Rule: level 1 is the top k of log q. The k nodes of a level with the best path score s (sum of log q) are expanded into
their top k. The `total` best of all k + (depth - 1) k^2 candidates stay. They form a tree, because s decreases along a
path.
Guarantee: a point-mass tree, for verification by matching; min(1, p/q) tests would be wrong on it.
The candidates are scored by the drafter's distribution at temperature 1, for any temperature of the target.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.trees.contracts import Builder, Level, Parents, verify_widths


@functools.cache
def eagle2(*, top_k: int = 10, depth: int = 8, total: int = 59) -> Builder:
    """Return a builder of `total` nodes, selected from `depth` levels of top_k x top_k candidates.

    The defaults are the authors'.

    Raises: UsageError for a number below 1.
    """
    if min(top_k, depth, total) < 1:
        raise UsageError(f"top_k, depth and total must be at least 1, not {top_k}, {depth} and {total}")
    width = top_k if depth == 1 else top_k**2
    candidates = depth * width
    total = min(total, top_k + (depth - 1) * top_k**2)

    def expand(state, level, parents: Parents):
        scores, frontier = state  # scores [B, depth * W] of all candidates and [B, k] of the parents
        batch, count = parents.ids.shape
        k = min(top_k, parents.vocab_size)
        tokens, log_q = parents.best(k, noisy=False)  # [B, F, k]
        score = frontier[:, :count, None] + jnp.where(parents.valid[:, :, None], log_q, -jnp.inf)
        fill = lambda x, value: jnp.pad(x.reshape(batch, -1), ((0, 0), (0, width - count * k)), constant_values=value)
        score, tokens = fill(score, -jnp.inf), fill(tokens, 0)
        parent = fill(jnp.broadcast_to(parents.ids[:, :, None], (batch, count, k)), 0)
        best, feed = jax.lax.top_k(score, top_k if depth > 1 else 1)
        scores = jax.lax.dynamic_update_slice_in_dim(scores, score, level * width, 1)
        state = scores, jnp.zeros_like(frontier).at[:, : best.shape[1]].set(best)
        return state, Level(tokens, parent, score > -jnp.inf, feed)

    def finish(state, parents, valid):
        best, nodes = jax.lax.top_k(state[0], total)  # ties go to the earlier node, so parents precede children
        nodes = jnp.sort(jnp.where(best > -jnp.inf, nodes + 1, candidates + 1), 1)
        nodes = jnp.where(nodes > candidates, -1, nodes)
        return jnp.pad(nodes, ((0, 0), (1, 0)))

    return Builder(
        init=lambda batch: (jnp.full((batch, candidates), -jnp.inf), jnp.zeros((batch, top_k))),
        expand=expand,
        finish=finish,
        num_nodes=total + 1,
        max_depth=depth,
        width=width,
        frontier=top_k if depth > 1 else 1,
        levels=depth,
        draws="point_mass",
        widths=verify_widths(range(1, total + 2)),
        warped=False,
    )
