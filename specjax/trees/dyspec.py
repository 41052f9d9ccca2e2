"""DySpec: trees that grow where the drafter is sure.

Xiong et al.: DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure (WWW 2025), arXiv 2410.11744.

Rule: the value of the next draw below a node is the product of q over its ancestors and of 1 - R over the siblings
drawn there already, R the law of a draw given those before it: the chance, if q were the acceptance rate, that the
draw is tested at all. `dyspec` draws level by level wherever the value is at least a threshold; `dyspec_fixed` always
takes the largest value, one draw and one pass of the drafter at a time, which is optimal for its size.
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

from specjax.errors import UsageError
from specjax.trees.grow import Builder, Level, Parents
from specjax.types import Array


@functools.cache
def dyspec(*, threshold: float = 1 / 64, width: int = 16, depth: int = 8, children: int = 8) -> Builder:
    """The threshold form: at most `width` nodes a level, `depth` levels and `children` draws per node."""
    if not 0 < threshold < 1:
        raise UsageError(f"threshold must lie between 0 and 1, not {threshold}")
    if min(width, depth, children) < 1:
        raise UsageError(f"width, depth and children must be at least 1, not {width}, {depth} and {children}")

    def expand(value: Array, level, parents: Parents):
        batch, present = parents.ids.shape
        value = jnp.where(parents.valid, value[:, :present], 0.0)
        tokens, laws = _race(parents, children)  # [B, F, C]
        out = _Row(*(jnp.zeros((batch, width), t) for t in (jnp.int32, jnp.int32, jnp.float32, bool)))
        used = jnp.zeros((batch, 1), jnp.int32)
        left = jnp.ones((batch, present))  # mass of q not drawn yet
        rows = jnp.arange(batch)[:, None]
        for race in range(tokens.shape[2]):
            wanted = (value >= threshold) & (laws[:, :, race] > 0)
            order = jnp.argsort(jnp.where(wanted, -value, jnp.inf), 1)  # of F nodes, before anything is drawn
            place = used + jnp.argsort(order, 1)
            drawn = wanted & (place < width)
            chance = jnp.where(left > 0, laws[:, :, race] / jnp.where(left > 0, left, 1.0), 0.0)
            chance = jnp.clip(chance, 0.0, 1.0)
            new = _Row(tokens[:, :, race], parents.ids, value * chance, drawn)
            slot = jnp.where(drawn, place, width)
            out = jax.tree.map(lambda old, x, slot=slot: old.at[rows, slot].set(x, mode="drop"), out, new)
            used = used + jnp.sum(drawn, 1, keepdims=True)
            value = jnp.where(drawn, value * (1 - chance), 0.0)
            left = left - laws[:, :, race]
        feed = jnp.broadcast_to(jnp.arange(width), (batch, width))
        return out.value, Level(out.tokens, out.parents, out.drawn, feed), parents.log_q

    nodes = 1 + width * depth
    return Builder(
        init=lambda batch: jnp.ones((batch, width)),
        expand=expand,
        finish=lambda state, parents, valid: _valid_first(valid),
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
    value: Array
    drawn: Array


def _race(parents: Parents, count: int) -> tuple[Array, Array]:
    """The first `count` draws without replacement below each node, int32[B, F, C], and q of each, float32[B, F, C]."""
    values, tokens = jax.lax.top_k(parents.scores(), min(count, parents.log_q.shape[-1]))
    q = jnp.exp(jnp.take_along_axis(parents.log_q, tokens, 2))
    return tokens, jnp.where(values > -jnp.inf, q, 0.0)


def _valid_first(valid: Array) -> Array:
    """int32[B, N]: the numbers of the valid nodes in order, then -1, so that a verify pass can be cut to them."""
    order = jnp.argsort(~valid, axis=1, stable=True)
    return jnp.where(jnp.take_along_axis(valid, order, 1), order, -1)


class _Open(NamedTuple):
    """The next draw below each node."""

    value: Array  # float32[B, N], 0 where there is none
    drawn: Array  # int32[B, N], children so far
    left: Array  # float32[B, N], mass of q not drawn yet
    tokens: Array  # int32[B, N, C]
    q: Array  # float32[B, N, C]
    reach: Array  # float32[B, N], product of q down to the node


@functools.cache
def dyspec_fixed(num_tokens: int, *, children: int = 16) -> Builder:
    """The greedy form: exactly `num_tokens` nodes, each with at most `children` children."""
    if min(num_tokens, children) < 1:
        raise UsageError(f"num_tokens and children must be at least 1, not {num_tokens} and {children}")
    n, races = num_tokens + 1, min(children, num_tokens)

    def init(batch):
        zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((batch, n, *shape), dtype)
        return _Open(
            zeros(),
            zeros(dtype=jnp.int32),
            zeros(),
            zeros(races, dtype=jnp.int32),
            zeros(races),
            zeros().at[:, 0].set(1.0),
        )

    def expand(s: _Open, level, parents: Parents):
        batch = parents.ids.shape[0]
        rows, node = jnp.arange(batch), parents.ids[:, 0]
        tokens, q = (jnp.pad(x[:, 0], ((0, 0), (0, races - x.shape[2]))) for x in _race(parents, races))
        s = s._replace(
            value=s.value.at[rows, node].set(jnp.where(parents.valid[:, 0], s.reach[rows, node], 0.0)),
            left=s.left.at[rows, node].set(1.0),
            tokens=s.tokens.at[rows, node].set(tokens),
            q=s.q.at[rows, node].set(q),
        )
        at_rank = jnp.take_along_axis(s.q, jnp.minimum(s.drawn, races - 1)[:, :, None], 2)[:, :, 0]
        open_ = (s.drawn < races) & (at_rank > 0)
        owner = jnp.argmax(jnp.where(open_, s.value, -1.0), 1).astype(jnp.int32)  # ties: the older
        exists = open_[rows, owner] & (s.value[rows, owner] > 0)
        rank = jnp.minimum(s.drawn[rows, owner], races - 1)
        q_y = s.q[rows, owner, rank]
        left = s.left[rows, owner]
        chance = jnp.clip(jnp.where(left > 0, q_y / jnp.where(left > 0, left, 1.0), 0.0), 0.0, 1.0)
        value = s.value[rows, owner]
        new = jnp.full((batch,), 1 + level)
        level_out = Level(
            s.tokens[rows, owner, rank][:, None], owner[:, None], exists[:, None], jnp.zeros((batch, 1), jnp.int32)
        )
        s = s._replace(
            value=s.value.at[rows, owner].set(value * (1 - chance)),
            drawn=s.drawn.at[rows, owner].add(1),
            left=s.left.at[rows, owner].add(-q_y),
            reach=s.reach.at[rows, jnp.minimum(new, n - 1)].set(value * chance),
        )
        return s, level_out, parents.log_q

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
    )
