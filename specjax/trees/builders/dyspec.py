"""DySpec: trees that grow where the drafter is confident.

Xiong et al.: DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure (WWW 2025), arXiv 2410.11744.

Rule: the value of the next draw below a node is the product of q over its ancestors and of 1 - R over the siblings
drawn already. R is the distribution of a draw given the previous draws. The value is the probability that the draw is
tested at all, if q is the acceptance rate. The second product is the remaining mass of q. `dyspec` draws level by level
wherever the value is at least a threshold. `dyspec_fixed` always takes the draw of the largest value, with one drafter
pass per draw, which is optimal for its size. Among equal values it takes the draw that has been open longest.
Guarantee: siblings are drawn without replacement. The decision to draw is made before the draw, and no drawn token is
dropped.
Deviations: the numbers of draws per level and per node are capped, in the order of the values. The threshold is
compared as in the paper's text.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.trees.contracts import Builder, Level, Parents, verify_widths
from specjax.types import Array


@functools.cache
def dyspec(*, threshold: float = 1 / 64, width: int = 16, depth: int = 8, children: int = 8) -> Builder:
    """Return the threshold form: at most `width` nodes per level, `depth` levels and `children` draws per node.

    Raises: UsageError for a threshold outside (0, 1) or a size below 1.
    """
    if not 0 < threshold < 1:
        raise UsageError(f"threshold must lie between 0 and 1, not {threshold}")
    if min(width, depth, children) < 1:
        raise UsageError(f"width, depth and children must be at least 1, not {width}, {depth} and {children}")

    def expand(reach: Array, level, parents: Parents):
        batch, num_parents = parents.ids.shape
        reach = jnp.where(parents.valid, reach[:, :num_parents], 0.0)  # product of q down to each node
        tokens, distributions = _race(parents, children)  # [B, F, C]
        nodes_out = _DraftedRow(*(jnp.zeros((batch, width), t) for t in (jnp.int32, jnp.int32, jnp.float32, bool)))
        used = jnp.zeros((batch, 1), jnp.int32)
        remaining = jnp.ones((batch, num_parents))  # remaining mass of q; 0 where drawing has stopped
        rows = jnp.arange(batch)[:, None]
        for race in range(tokens.shape[2]):
            q, value = distributions[:, :, race], reach * remaining
            worth_drawing = (value >= threshold) & (q > 0)
            order = jnp.argsort(jnp.where(worth_drawing, -value, jnp.inf), 1)  # order of the F nodes for this draw
            place = used + jnp.argsort(order, 1)
            drawn = worth_drawing & (place < width)
            draws = _DraftedRow(tokens[:, :, race], parents.ids, reach * q, drawn)
            slot = jnp.where(drawn, place, width)
            nodes_out = jax.tree.map(lambda old, x, slot=slot: old.at[rows, slot].set(x, mode="drop"), nodes_out, draws)
            used = used + jnp.sum(drawn, 1, keepdims=True)
            remaining = jnp.where(drawn, jnp.maximum(remaining - q, 0.0), 0.0)
        feed = jnp.broadcast_to(jnp.arange(width), (batch, width))
        return nodes_out.reach, Level(nodes_out.tokens, nodes_out.parents, nodes_out.drawn, feed)

    nodes = 1 + width * depth
    return Builder(
        init=lambda batch: jnp.ones((batch, width)),
        expand=expand,
        finish=lambda state, parents, valid: jnp.broadcast_to(jnp.arange(nodes), valid.shape),
        num_nodes=nodes,
        max_depth=depth,
        width=width,
        frontier=width,
        levels=depth,
        draws="without_replacement",
        widths=tuple(w for w in (1, 8, 16, 32, 64) if w < nodes),
        prunes=True,
    )


class _DraftedRow(NamedTuple):
    tokens: Array
    parents: Array
    reach: Array
    drawn: Array


def _race(parents: Parents, count: int) -> tuple[Array, Array]:
    """Return the first `count` draws without replacement below each node, and their probabilities.

    Returns: tokens int32[B, F, C] and q float32[B, F, C].
    """
    tokens, scores = parents.best(min(count, parents.vocab_size))
    q = jnp.exp(parents.reduce(lambda log_q, keys, tokens: take_along(log_q, tokens, 2), tokens))
    return tokens, jnp.where(scores > -jnp.inf, q, 0.0)


class _OpenDraws(NamedTuple):
    """The next draw below each node. Its value is reach * remaining."""

    reach: Array  # float32[B, N], product of q down to the node
    remaining: Array  # float32[B, N], remaining mass of q; 0 below missing nodes
    since: Array  # int32[B, N], time when this draw became open
    drawn: Array  # int32[B, N], number of children so far
    tokens: Array  # int32[B, N, C]
    q: Array  # float32[B, N, C]


@functools.cache
def dyspec_fixed(num_tokens: int, *, children: int = 16) -> Builder:
    """Return the greedy form: exactly `num_tokens` nodes, each with at most `children` children.

    Raises: UsageError for a size below 1.
    """
    if min(num_tokens, children) < 1:
        raise UsageError(f"num_tokens and children must be at least 1, not {num_tokens} and {children}")
    n, races = num_tokens + 1, min(children, num_tokens)

    def init(batch):
        zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((batch, n, *shape), dtype)
        ints = lambda *shape: zeros(*shape, dtype=jnp.int32)
        return _OpenDraws(zeros().at[:, 0].set(1.0), zeros(), ints(), ints(), ints(races), zeros(races))

    def next_draws(s: _OpenDraws):
        """Return for each node [B, N] the rank of its next draw, the draw's q, and its value."""
        rank = jnp.minimum(s.drawn, races - 1)
        q = take_along(s.q, rank[:, :, None], 2)[:, :, 0]
        return rank, q, jnp.where((s.drawn < races) & (q > 0), s.reach * s.remaining, 0.0)

    def expand(s: _OpenDraws, level, parents: Parents):
        rows, node = jnp.arange(parents.ids.shape[0]), parents.ids[:, 0]
        tokens, q = (jnp.pad(x[:, 0], ((0, 0), (0, races - x.shape[2]))) for x in _race(parents, races))
        s = s._replace(
            remaining=s.remaining.at[rows, node].set(jnp.where(parents.valid[:, 0], 1.0, 0.0)),
            since=s.since.at[rows, node].set(2 * level - 1),  # after its next sibling, which opened with it
            tokens=s.tokens.at[rows, node].set(tokens),
            q=s.q.at[rows, node].set(q),
        )
        rank, at_rank, value = next_draws(s)
        best = jnp.max(value, 1, keepdims=True)
        tied = value >= best * (1 - 1e-6)  # equal up to rounding
        parent = jnp.argmin(jnp.where(tied, s.since, 2 * n), 1).astype(jnp.int32)
        at = lambda x: x[rows, parent]
        token, q_y = s.tokens[rows, parent, at(rank)], at(at_rank)
        drafted = Level(token[:, None], parent[:, None], best > 0, jnp.zeros_like(parent)[:, None])
        s = s._replace(
            reach=s.reach.at[rows, jnp.minimum(1 + level, n - 1)].set(at(s.reach) * q_y),
            remaining=s.remaining.at[rows, parent].set(jnp.maximum(at(s.remaining) - q_y, 0.0)),
            since=s.since.at[rows, parent].set(2 * level),
            drawn=s.drawn.at[rows, parent].add(1),
        )
        return s, drafted

    return Builder(
        init=init,
        expand=expand,
        finish=lambda state, parents, valid: jnp.broadcast_to(jnp.arange(n), parents.shape),
        num_nodes=n,
        max_depth=num_tokens,
        width=1,
        frontier=1,
        levels=num_tokens,
        draws="chain" if num_tokens == 1 else "without_replacement",
        widths=verify_widths(range(1, n + 1)),
        is_open=lambda state: jnp.any(next_draws(state)[2] > 0, 1),
    )
