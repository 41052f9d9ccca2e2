"""Growing a token tree level by level from a drafter that gives logits: one pass of the drafter per level.

A `Builder` decides which tokens to draft and which of them to look below; `grow` runs it against `feed`, the drafter.
The passes end when no row has anything left to draft: at its limit, or where the builder's `Stop` has stopped it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.indexing import take_along
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array, Context, Draws, PyTree, TokenTree


class Parents(NamedTuple):
    """The nodes whose children are to be drafted, as the builder chose them in the level before."""

    ids: Array  # int32[B, F], node numbers; 0 is the root
    valid: Array  # bool[B, F], whether to draft below it: it exists, lies above the limit and was not stopped
    log_q: Array  # float32[B, F, V], normalised: the warped law of their children
    keys: Array | None  # [B, F], of the children's noise; None: no noise, draft the likeliest tokens
    coupled: bool  # the noise is the target's own: one field per position

    def noise(self, race: int = 0) -> Array:
        """Gumbel noise float32[B, F, V] for a draw of the children; each race is an independent draw."""
        assert self.keys is not None
        keys = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, race)))(self.keys) if race else self.keys
        return sampling.noise(keys, self.log_q.shape[-1])

    def best(self, k: int, *, noisy: bool = True) -> tuple[Array, Array]:
        """k children of each, drawn without replacement in this order (Gumbel-top-k): int32[B, F, k], and their scores.

        The likeliest where there is no noise, or none is wanted. float32[B, F, k]: -inf where there is no such child.
        """
        return gumbel_topk(self.keys if noisy else None, self.log_q, k)


class Level(NamedTuple):
    """W drafted nodes. Siblings stand in draft order."""

    tokens: Array  # int32[B, W]
    parents: Array  # int32[B, W], node numbers
    valid: Array  # bool[B, W]
    feed: Array  # int32[B, F], the slots of this level to draft below


class Fed(NamedTuple):
    """Nodes that the drafter has just read, as a stop rule sees them."""

    log_q: Array  # float32[B, F, V], normalised: the law of their children, as they will be drawn
    depth: Array  # int32[B, F]


class Stop(NamedTuple):
    """When to draft no further; `specjax.trees.stops` has the rules.

    `judge(value, fed) -> (value, go_on bool[B, F])` looks at the nodes of a pass and at what their parents left them in
    `value` float32[B, F]; the value it returns is for their children. Where it does not go on, nothing is drafted below
    the children, or, without `keeps`, below the nodes themselves. It reads laws and what was drawn above them, never
    what is drawn from them: so drafts keep their law, and exact rules stay exact.
    """

    judge: Callable[[Array, Fed], tuple[Array, Array]]
    keeps: bool = True  # the tokens drawn at the stop stay in the draft
    start: float = 0.0  # the root's value


@dataclass(frozen=True)
class Builder:
    """How a tree grows. Node 1 + d * width + w is slot w of level d + 1.

    `expand(state, level, parents) -> (state, Level, log_q)`: draft the children of `parents`; `log_q` float32[B, F, V]
    is what they were drawn from. `finish(state, parents, valid) -> int32[B, num_nodes]`: the nodes of the tree, parents
    first, the root (0) at the front; -1 for none.
    """

    init: Callable[[int], PyTree]  # (batch) -> state
    expand: Callable[[PyTree, Array, Parents], tuple[PyTree, Level, Array]]
    finish: Callable[[PyTree, Array, Array], Array]
    num_nodes: int  # N, root included
    max_depth: int
    width: int  # W
    frontier: int  # F
    levels: int  # passes of the drafter, the root's included
    draws: Draws
    widths: tuple[int, ...] = ()  # verify widths worth compiling, where the number of valid nodes varies
    warped: bool = True  # False: `log_q` is the drafter's own law, whatever the temperature
    stop: Stop | None = None
    is_open: Callable[[PyTree], Array] | None = None  # (state) -> bool[B]: draws are left elsewhere than below `feed`
    keep_laws: bool = False  # give the laws of sampled trees in greedy and coupled decoding too


@functools.cache
def with_stop(builder: Builder, stop: Stop | None, *, keep_laws: bool = False) -> Builder:
    """`builder` with a stop rule. Its valid nodes stand at the front, for verify passes of several widths.

    keep_laws: give the laws of drawn trees in greedy and coupled decoding too, for what reads them.
    """
    if stop is not None:
        narrower = tuple(width for width in (1, 4, 8, 16, 32) if width < builder.num_nodes)
        builder = replace(builder, stop=stop, widths=builder.widths or narrower)
    return replace(builder, keep_laws=keep_laws)


class Grown(NamedTuple):
    """A tree and where its nodes lie in the drafter's memory."""

    tree: TokenTree
    # int32[B, N]: node i is the places[:, i]-th token to be fed, the root the 0-th; -1: none. The deepest of a path may
    # never have been fed.
    places: Array


def grow(
    builder: Builder, feed, memory: PyTree, root: Array, root_logits: Array, keys: Array, context: Context, limit: Array
) -> tuple[Grown, PyTree]:
    """Draft a tree below `root` int32[B], whose logits float32[B, V] are known already.

    Args:
      feed: (memory, place, tokens[B, F], depth[B, F], seen[B, F, places]) -> (memory, logits[B, F, V]). The F tokens
        are the place-th and following fed; `seen` says which tokens fed before each may see.
      keys: [B]. context: how the target samples; `context.noise` shares its noise. limit: int32[B], deepest level.
    """
    batch = root.shape[0]
    w, f, total = builder.width, builder.frontier, builder.levels * builder.width + 1
    places = 1 + (builder.levels - 1) * f
    rows = jnp.arange(batch)[:, None]
    coupled = context.noise is not None
    drawn = builder.draws != "point_mass"
    keep_laws = drawn and (builder.keep_laws or (context.sampling.temperature is not None and not coupled))

    def expand(carry: _Carry, logits) -> _Carry:
        """Draft below the frontier, whose children's logits are given, and note what is to be fed next."""
        level, nodes, grown = carry.level, carry.nodes, carry.grown
        take = lambda x: take_along(x, nodes, 1)
        depth, below = take(grown.depth), take(grown.below)
        log_q, noise, shared = _laws(builder, logits, keys, level, depth, context)
        if builder.stop is not None:
            value, go_on = builder.stop.judge(take(grown.value), Fed(log_q, depth))
            below = below if builder.stop.keeps else below & go_on
            write = lambda old, new: old.at[rows, nodes].set(new)
            grown = grown._replace(
                value=write(grown.value, value), go_on=write(grown.go_on, go_on), below=write(grown.below, below)
            )
        state, new, log_q = builder.expand(carry.state, level, Parents(nodes, below, log_q, noise, shared))
        laws = carry.laws
        if laws is not None:
            laws = jax.lax.dynamic_update_slice_in_dim(laws, log_q, jnp.where(level > 0, 1 + (level - 1) * f, 0), 1)
        return _Carry(level + 1, 1 + level * w + new.feed, record(grown, level, new), state, carry.memory, laws)

    def record(grown: _Nodes, level, new: Level) -> _Nodes:
        """Write a level into the arrays of all nodes."""
        above = lambda x: take_along(x, new.parents, 1)
        depth = above(grown.depth) + 1
        seen = take_along(grown.seen, new.parents[:, :, None], 1)  # what the parent saw, and the parent
        seen |= above(grown.place)[:, :, None] == jnp.arange(places)
        fresh = jnp.any(new.feed[:, None, :] == jnp.arange(w)[None, :, None], 2)  # [B, W]
        fresh &= level < builder.levels - 1  # nothing is fed below the last level
        slot = jnp.argmax(new.feed[:, None, :] == jnp.arange(w)[None, :, None], 2)
        place = jnp.where(fresh, 1 + level * f + slot, -1)
        valid = new.valid & above(grown.below)
        below = valid & (depth < limit[:, None]) & above(grown.go_on)
        values = _Nodes(
            new.tokens, new.parents, valid, depth, seen, place, below, jnp.ones_like(below), above(grown.value)
        )
        write = lambda old, value: jax.lax.dynamic_update_slice_in_dim(old, value.astype(old.dtype), 1 + level * w, 1)
        return jax.tree.map(write, grown, values)

    def is_going(carry: _Carry):
        going = take_along(carry.grown.below, carry.nodes, 1)
        left = jnp.any(going) if builder.is_open is None else jnp.any(going) | jnp.any(builder.is_open(carry.state))
        return (carry.level < builder.levels) & left

    def pass_(carry: _Carry) -> _Carry:
        """Feed the frontier of the level before and draft below it."""
        take = lambda x: take_along(x, carry.nodes, 1)
        seen = take_along(carry.grown.seen, carry.nodes[:, :, None], 1)
        place = 1 + (carry.level - 1) * f
        memory, logits = feed(carry.memory, place, take(carry.grown.tokens), take(carry.grown.depth), seen)
        return expand(carry._replace(memory=memory), logits)

    at_root = lambda value, *shape, dtype=jnp.int32: jnp.full((batch, *shape), value, dtype).at[:, 0]
    grown = _Nodes(
        tokens=at_root(0, total).set(root),
        parents=at_root(0, total).set(-1),
        valid=at_root(False, total, dtype=bool).set(True),
        depth=jnp.zeros((batch, total), jnp.int32),
        seen=jnp.zeros((batch, total, places), bool),
        place=at_root(-1, total).set(0),
        below=at_root(False, total, dtype=bool).set(limit > 0),
        go_on=jnp.ones((batch, total), bool),
        value=jnp.full((batch, total), 0.0 if builder.stop is None else builder.stop.start),
    )
    laws = jnp.zeros((batch, places, root_logits.shape[-1])) if keep_laws else None
    carry = _Carry(jnp.int32(0), jnp.zeros((batch, 1), jnp.int32), grown, builder.init(batch), memory, laws)
    carry = expand(carry, root_logits[:, None])
    if builder.levels > 1:
        with jax.named_scope(LEVELS):
            carry = jax.lax.while_loop(is_going, pass_, carry)
    return _finish(builder, carry), carry.memory


LEVELS = "draft_levels"
"""Name of the loop over the passes of the drafter in a compiled program; how often it runs depends on the data."""


def _finish(builder: Builder, carry: _Carry) -> Grown:
    """The tree of the nodes that the builder keeps."""
    grown = carry.grown
    chosen = builder.finish(carry.state, grown.parents, grown.valid)  # int32[B, N]
    if builder.stop is not None:
        chosen = valid_first(chosen, grown.valid)
    new_place = jnp.max(
        jnp.where(chosen[:, :, None] == jnp.arange(grown.tokens.shape[1]), jnp.arange(builder.num_nodes)[:, None], -1),
        1,
    )  # of each id
    take = lambda x: take_along(x, jnp.maximum(chosen, 0), 1)
    parents = take_along(new_place, jnp.maximum(take(grown.parents), 0), 1)
    first = jnp.arange(builder.num_nodes) == 0
    valid = (chosen >= 0) & take(grown.valid) | first
    tree = TokenTree(take(grown.tokens), jnp.where(first, -1, jnp.where(valid, parents, 0)).astype(jnp.int32), valid)
    place = jnp.where(chosen >= 0, take(grown.place), -1)
    if carry.laws is not None:
        # Of nodes below which nothing is drafted it depends on the other rows whether they were fed.
        fed = (place >= 0) & (take(grown.below) | first)
        laws = take_along(carry.laws, jnp.maximum(place, 0)[:, :, None], 1)
        tree = tree._replace(logits=jnp.where(fed[:, :, None], laws, 0.0))
    return Grown(tree, place)


def valid_first(chosen: Array, valid: Array) -> Array:
    """int32[B, N]: the numbers `chosen` of valid nodes, in order, then -1, so that a verify pass can be cut to them."""
    keep = (chosen >= 0) & take_along(valid, jnp.maximum(chosen, 0), 1)
    order = jnp.argsort(~keep, axis=1, stable=True)
    return jnp.where(take_along(keep, order, 1), take_along(chosen, order, 1), -1)


class _Carry(NamedTuple):
    level: Array  # int32[], of the nodes to draft
    nodes: Array  # int32[B, F], to draft below
    grown: _Nodes
    state: PyTree  # the builder's
    memory: PyTree  # the drafter's
    laws: Array | None  # float32[B, places, V], of the nodes fed


class _Nodes(NamedTuple):
    tokens: Array  # int32[B, nodes]
    parents: Array  # int32[B, nodes]
    valid: Array  # bool[B, nodes]
    depth: Array  # int32[B, nodes]
    seen: Array  # bool[B, nodes, places]
    place: Array  # int32[B, nodes], order in which it is fed, or -1
    below: Array  # bool[B, nodes], whether to draft below it, as far as is known
    go_on: Array  # bool[B, nodes], the stop rule's word on its children
    value: Array  # float32[B, nodes], the stop rule's own: of its parent until it is fed, then of its children


def _laws(builder: Builder, logits: Array, keys: Array, level, depth: Array, context: Context):
    """The law of each node's children float32[B, F, V], the keys of their noise [B, F], and whether it is shared."""
    is_greedy = context.sampling.temperature is None
    warped = logits if is_greedy or not builder.warped else sampling.warp(logits, context.sampling)
    log_q = jax.nn.log_softmax(warped.astype(jnp.float32), -1)
    coupled = context.noise is not None
    if is_greedy:
        return log_q, None, coupled
    if context.noise is not None:  # the noise with which the target draws at the children's position
        return log_q, sampling.node_keys(context.noise, context.length, depth), coupled
    split = lambda key: jax.random.split(jax.random.fold_in(key, level), depth.shape[1])
    return log_q, jax.vmap(split)(keys), coupled
