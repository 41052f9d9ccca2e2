"""DySpec: trees that grow where the drafter is sure.

Xiong et al.: DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure (WWW 2025), arXiv 2410.11744.

Rule: the value of the next draw below a node is the product of q over its ancestors and of 1 - R over the siblings
drawn there already, R the distribution of a draw given those before it: the chance, if q were the acceptance rate,
that the draw is tested at all. The second product is the mass of q that is left. `dyspec` draws level by level
wherever the value is at least a threshold; `dyspec_fixed` always takes the largest value, of equal ones the draw that
has been open for longest, one draw and one pass of the drafter at a time, which is optimal for its size.
Guarantee: siblings are drawn without replacement: whether a draw happens is decided before it, and nothing drawn is
dropped.
Deviations: caps on draws per level and per node, applied in the order of the values; the threshold's comparison is the
one the paper's text describes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.trees.contracts import Builder, Level, Parents, narrower
from specjax.types import Array


@functools.cache
def dyspec(*, threshold: float = 1 / 64, width: int = 16, depth: int = 8, children: int = 8) -> Builder:
    """The threshold form: at most `width` nodes a level, `depth` levels and `children` draws per node."""
    if not 0 < threshold < 1:
        raise UsageError(f"threshold must lie between 0 and 1, not {threshold}")
    if min(width, depth, children) < 1:
        raise UsageError(f"width, depth and children must be at least 1, not {width}, {depth} and {children}")

    def expand(reach: Array, level, parents: Parents):
        batch, present = parents.ids.shape
        reach = jnp.where(parents.valid, reach[:, :present], 0.0)  # product of q down to each node
        tokens, distributions = _race(parents, children)  # [B, F, C]
        out = _Row(*(jnp.zeros((batch, width), t) for t in (jnp.int32, jnp.int32, jnp.float32, bool)))
        used = jnp.zeros((batch, 1), jnp.int32)
        left = jnp.ones((batch, present))  # mass of q not drawn yet; 0 where drawing has stopped
        rows = jnp.arange(batch)[:, None]
        for race in range(tokens.shape[2]):
            q, value = distributions[:, :, race], reach * left
            wanted = (value >= threshold) & (q > 0)
            order = jnp.argsort(jnp.where(wanted, -value, jnp.inf), 1)  # of F nodes, before anything is drawn
            place = used + jnp.argsort(order, 1)
            drawn = wanted & (place < width)
            new = _Row(tokens[:, :, race], parents.ids, reach * q, drawn)
            slot = jnp.where(drawn, place, width)
            out = jax.tree.map(lambda old, x, slot=slot: old.at[rows, slot].set(x, mode="drop"), out, new)
            used = used + jnp.sum(drawn, 1, keepdims=True)
            left = jnp.where(drawn, jnp.maximum(left - q, 0.0), 0.0)
        feed = jnp.broadcast_to(jnp.arange(width), (batch, width))
        return out.reach, Level(out.tokens, out.parents, out.drawn, feed), parents.log_q

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
    )


class _Row(NamedTuple):
    tokens: Array
    parents: Array
    reach: Array
    drawn: Array


def _race(parents: Parents, count: int) -> tuple[Array, Array]:
    """The first `count` draws without replacement below each node, int32[B, F, C], and q of each, float32[B, F, C]."""
    tokens, scores = parents.best(min(count, parents.log_q.shape[-1]))
    q = jnp.exp(take_along(parents.log_q, tokens, 2))
    return tokens, jnp.where(scores > -jnp.inf, q, 0.0)


class _Open(NamedTuple):
    """The next draw below each node. Its value is reach * left."""

    reach: Array  # float32[B, N], product of q down to the node
    left: Array  # float32[B, N], mass of q not drawn yet; 0 below nodes that are not there yet
    since: Array  # int32[B, N], when this draw came open
    drawn: Array  # int32[B, N], children so far
    tokens: Array  # int32[B, N, C]
    q: Array  # float32[B, N, C]


@functools.cache
def dyspec_fixed(num_tokens: int, *, children: int = 16) -> Builder:
    """The greedy form: exactly `num_tokens` nodes, each with at most `children` children."""
    if min(num_tokens, children) < 1:
        raise UsageError(f"num_tokens and children must be at least 1, not {num_tokens} and {children}")
    n, races = num_tokens + 1, min(children, num_tokens)

    def init(batch):
        zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((batch, n, *shape), dtype)
        whole = lambda *shape: zeros(*shape, dtype=jnp.int32)
        return _Open(zeros().at[:, 0].set(1.0), zeros(), whole(), whole(), whole(races), zeros(races))

    def next_draws(s: _Open):
        """Below each node, [B, N]: the rank of the next draw, its q, and its value."""
        rank = jnp.minimum(s.drawn, races - 1)
        q = take_along(s.q, rank[:, :, None], 2)[:, :, 0]
        return rank, q, jnp.where((s.drawn < races) & (q > 0), s.reach * s.left, 0.0)

    def expand(s: _Open, level, parents: Parents):
        rows, node = jnp.arange(parents.ids.shape[0]), parents.ids[:, 0]
        tokens, q = (jnp.pad(x[:, 0], ((0, 0), (0, races - x.shape[2]))) for x in _race(parents, races))
        s = s._replace(
            left=s.left.at[rows, node].set(jnp.where(parents.valid[:, 0], 1.0, 0.0)),
            since=s.since.at[rows, node].set(2 * level - 1),  # behind its next sibling, which came open with it
            tokens=s.tokens.at[rows, node].set(tokens),
            q=s.q.at[rows, node].set(q),
        )
        rank, at_rank, value = next_draws(s)
        best = jnp.max(value, 1, keepdims=True)
        tied = value >= best * (1 - 1e-6)  # equal up to rounding
        owner = jnp.argmin(jnp.where(tied, s.since, 2 * n), 1).astype(jnp.int32)
        at = lambda x: x[rows, owner]
        token, q_y = s.tokens[rows, owner, at(rank)], at(at_rank)
        new = Level(token[:, None], owner[:, None], best > 0, jnp.zeros_like(owner)[:, None])
        s = s._replace(
            reach=s.reach.at[rows, jnp.minimum(1 + level, n - 1)].set(at(s.reach) * q_y),
            left=s.left.at[rows, owner].set(jnp.maximum(at(s.left) - q_y, 0.0)),
            since=s.since.at[rows, owner].set(2 * level),
            drawn=s.drawn.at[rows, owner].add(1),
        )
        return s, new, parents.log_q

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
        widths=narrower(range(1, n + 1)),
        is_open=lambda state: jnp.any(next_draws(state)[2] > 0, 1),
    )
