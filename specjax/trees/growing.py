"""Growing a token tree level by level from a drafter that gives logits: one pass of the drafter per level.

A `Builder` decides which tokens to draft and below which of them to go on; `grow` runs it against `feed`, the drafter.
The passes end when no row has anything left to draft: at its limit, or where the builder's `Stop` has stopped it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.arrays.indexing import gather_at, take_along
from specjax.numerics import sampling
from specjax.trees.contracts import Builder, Fed, FeedFn, Frontier, Level, Parents, Stop
from specjax.types import Array, Context, DraftOutput, PyTree, TokenTree


class Grown(NamedTuple):
    """A tree and where its nodes lie in the drafter's memory."""

    tree: TokenTree
    # int32[B, N]: node i is the places[:, i]-th token to be fed, the root the 0-th; -1: none. The deepest of a path may
    # never have been fed.
    places: Array
    # float32[B, N]: how likely the drafter holds each node to be right where its parent is, if the builder asks for it.
    chances: Array | None = None


def grow(
    builder: Builder,
    feed: FeedFn | None,
    memory: PyTree,
    root: Array,
    said: Array | DraftOutput,
    keys: Array | None,
    context: Context,
    limit: Array,
) -> tuple[Grown, PyTree]:
    """Draft a tree below `root` int32[B].

    Args:
      feed: reads the frontier of each level; not called for trees of one level. memory: its own.
      said: what the drafter says of the root's children, logits float32[B, V] or with its confidence float32[B].
      keys: [B]; None: greedy. context: how the target samples; `context.noise` shares its noise.
      limit: int32[B], deepest level.
    """
    given = _Given(builder, keys, context, limit)
    said = jax.tree.map(lambda x: x[:, None], said)
    carry = _expand(given, _start(given, root, memory, _logits(said).shape[-1]), said)
    if builder.levels > 1:
        assert feed is not None
        with jax.named_scope(scopes.LEVELS):
            is_going, level = functools.partial(_is_going, builder), functools.partial(_level, given, feed)
            carry = jax.lax.while_loop(is_going, level, carry)
    return _finish(builder, carry), carry.memory


class _Given(NamedTuple):
    """What stays the same from level to level."""

    builder: Builder
    keys: Array | None  # [B]
    context: Context
    limit: Array  # int32[B]


class _Nodes(NamedTuple):
    """All nodes so far, in the order of `Builder`."""

    tokens: Array  # int32[B, nodes]
    parents: Array  # int32[B, nodes]
    valid: Array  # bool[B, nodes]
    depth: Array  # int32[B, nodes]
    seen: Array  # bool[B, nodes, places]
    place: Array  # int32[B, nodes], order in which it is fed, or -1
    below: Array  # bool[B, nodes], whether to draft below it, as far as is known
    go_on: Array  # bool[B, nodes], the stop rule's word on its children
    value: PyTree  # float32[B, nodes] each, the stop rule's own: of its parent until it is fed, then of its children
    chances: Array | None  # float32[B, nodes], as `Grown` has them


class _Carry(NamedTuple):
    level: Array  # int32[], of the nodes to draft
    nodes: Array  # int32[B, F], the frontier: those to draft below
    grown: _Nodes
    state: PyTree  # the builder's
    memory: PyTree  # the drafter's
    log_q: Array | None  # float32[B, places, V], log q below the nodes fed


def _start(given: _Given, root: Array, memory: PyTree, vocab: int) -> _Carry:
    """The root alone, which is the first frontier."""
    builder, context, batch = given.builder, given.context, root.shape[0]
    at_root = lambda value, dtype=jnp.int32: jnp.full((batch, builder.size), value, dtype).at[:, 0]
    number = lambda start: jnp.full((batch, builder.size), start, jnp.float32)
    grown = _Nodes(
        tokens=at_root(0).set(root),
        parents=at_root(0).set(-1),
        valid=at_root(False, bool).set(True),
        depth=jnp.zeros((batch, builder.size), jnp.int32),
        seen=jnp.zeros((batch, builder.size, builder.places), bool),
        place=at_root(-1).set(0),
        below=at_root(False, bool).set(given.limit > 0),
        go_on=jnp.ones((batch, builder.size), bool),
        value=() if builder.stop is None else jax.tree.map(number, builder.stop.start),
        chances=number(1.0) if builder.weighed else None,
    )
    is_sampled = context.sampling.temperature is not None and context.noise is None
    keep_logits = builder.draws != "point_mass" and (builder.keep_logits or is_sampled)
    log_q = jnp.zeros((batch, builder.places, vocab)) if keep_logits else None
    return _Carry(jnp.int32(0), jnp.zeros((batch, 1), jnp.int32), grown, builder.init(batch), memory, log_q)


def _is_going(builder: Builder, carry: _Carry) -> Array:
    """bool[]: whether any row has anything left to draft."""
    going = take_along(carry.grown.below, carry.nodes, 1)
    left = jnp.any(going) if builder.is_open is None else jnp.any(going) | jnp.any(builder.is_open(carry.state))
    return (carry.level < builder.levels) & left


def _level(given: _Given, feed: FeedFn, carry: _Carry) -> _Carry:
    """Feed the frontier of the level before and draft below it."""
    grown = carry.grown
    take = lambda x: take_along(x, carry.nodes, 1)
    place = 1 + (carry.level - 1) * given.builder.frontier
    seen = take_along(grown.seen, carry.nodes[:, :, None], 1)
    frontier = Frontier(place, take(grown.tokens), take(grown.depth), seen, take(grown.below))
    memory, said = feed(carry.memory, frontier)
    return _expand(given, carry._replace(memory=memory), said)


def _logits(said: Array | DraftOutput) -> Array:
    return said.logits if isinstance(said, DraftOutput) else said


def _expand(given: _Given, carry: _Carry, said: Array | DraftOutput) -> _Carry:
    """Draft below the frontier, of whose children the drafter said this, and note what is to be fed next."""
    builder, level, nodes = given.builder, carry.level, carry.nodes
    depth = take_along(carry.grown.depth, nodes, 1)
    said = said if isinstance(said, DraftOutput) else DraftOutput(said)
    log_q, noise = _distribution(given, said.logits, level, depth)
    fed = Fed(log_q, depth, said.logits, said.confidence, said.accepted)
    grown, below = _judge(builder.stop, carry.grown, nodes, fed)
    is_greedy = None if noise is None else sampling.is_greedy(given.context.sampling, len(nodes))
    parents = Parents(nodes, below, log_q, noise, given.context.noise is not None, is_greedy)
    state, new, drawn = builder.expand(carry.state, level, parents)
    chances = _chances(nodes, new, log_q, said.confidence) if builder.weighed else None
    kept = carry.log_q
    if kept is not None:
        place = jnp.where(level > 0, 1 + (level - 1) * builder.frontier, 0)
        kept = jax.lax.dynamic_update_slice_in_dim(kept, drawn, place, 1)
    following = 1 + level * builder.width + new.feed
    return _Carry(level + 1, following, _record(given, grown, level, new, chances), state, carry.memory, kept)


def _chances(nodes: Array, new: Level, log_q: Array, confidence: Array | None) -> Array:
    """float32[B, W]: of the nodes drafted below the frontier `nodes`, whose children's log q is [B, F, V]. A drafter's
    own confidence [B, F] is that of the likeliest child, and the others have their share of it."""
    slot = jnp.argmax(new.parents[:, :, None] == nodes[:, None, :], 2)  # their parents' places in the frontier
    own = gather_at(log_q, jnp.arange(len(nodes))[:, None], slot, new.tokens)
    if confidence is None:
        return jnp.exp(own)
    return jnp.exp(own - take_along(jnp.max(log_q, -1), slot, 1)) * take_along(confidence, slot, 1)


def _distribution(given: _Given, logits: Array, level: Array, depth: Array) -> tuple[Array, Array | None]:
    """log q of the children of nodes at `depth` int32[B, F], float32[B, F, V], and the keys of their noise [B, F]."""
    builder, context = given.builder, given.context
    normalised = lambda x: jax.nn.log_softmax(x.astype(jnp.float32), -1)
    if context.sampling.temperature is None:
        return normalised(logits), None
    if builder.warped:  # not of greedy rows, which would be left one token
        is_greedy = sampling.is_greedy(context.sampling, len(depth))[:, None, None]
        logits = jnp.where(is_greedy, logits, sampling.warp(logits, context.sampling))
    log_q = normalised(logits)
    if context.noise is not None:  # the noise with which the target draws at the children's position
        return log_q, sampling.node_keys(context.noise, context.length, depth)
    split = lambda key: jax.random.split(jax.random.fold_in(key, level), depth.shape[1])
    return log_q, jax.vmap(split)(given.keys)


def _judge(stop: Stop | None, grown: _Nodes, nodes: Array, fed: Fed) -> tuple[_Nodes, Array]:
    """What the stop rule says of the frontier `nodes` int32[B, F], and below which of them to draft: bool[B, F]."""
    take = lambda x: take_along(x, nodes, 1)
    below = take(grown.below)
    if stop is None:
        return grown, below
    value, go_on = stop.judge(jax.tree.map(take, grown.value), fed)
    below = below if stop.keeps else below & go_on
    rows = jnp.arange(nodes.shape[0])[:, None]
    write = lambda old, new: old.at[rows, nodes].set(new)
    value = jax.tree.map(write, grown.value, value)
    return grown._replace(value=value, go_on=write(grown.go_on, go_on), below=write(grown.below, below)), below


def _record(given: _Given, grown: _Nodes, level: Array, new: Level, chances: Array | None) -> _Nodes:
    """Write a level into the arrays of all nodes."""
    builder = given.builder
    above = lambda x: take_along(x, new.parents, 1)
    depth = above(grown.depth) + 1
    seen = take_along(grown.seen, new.parents[:, :, None], 1)  # what the parent saw, and the parent
    seen |= above(grown.place)[:, :, None] == jnp.arange(builder.places)
    is_fed = new.feed[:, None, :] == jnp.arange(builder.width)[:, None]  # [B, W, F]
    fed = jnp.any(is_fed, 2) & (level < builder.levels - 1)  # nothing is fed below the last level
    place = jnp.where(fed, 1 + level * builder.frontier + jnp.argmax(is_fed, 2), -1)
    valid = new.valid & above(grown.below)
    below = valid & (depth < given.limit[:, None]) & above(grown.go_on)
    values = _Nodes(
        tokens=new.tokens,
        parents=new.parents,
        valid=valid,
        depth=depth,
        seen=seen,
        place=place,
        below=below,
        go_on=jnp.ones_like(below),
        value=jax.tree.map(above, grown.value),
        chances=chances,
    )
    start = 1 + level * builder.width
    write = lambda old, value: jax.lax.dynamic_update_slice_in_dim(old, value.astype(old.dtype), start, 1)
    return jax.tree.map(write, grown, values)


def _finish(builder: Builder, carry: _Carry) -> Grown:
    """The tree of the nodes that the builder keeps."""
    grown = carry.grown
    chosen = builder.finish(carry.state, grown.parents, grown.valid)  # int32[B, N]
    if not builder.weighed:
        chosen = _valid_first(chosen, grown.valid)
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
    if carry.log_q is not None:
        # Of nodes below which nothing is drafted it depends on the other rows whether they were fed.
        fed = (place >= 0) & take(grown.below)
        rows = take_along(carry.log_q, jnp.maximum(place, 0)[:, :, None], 1)
        tree = tree._replace(logits=jnp.where(fed[:, :, None], rows, 0.0))
    return Grown(tree, place, None if grown.chances is None else take(grown.chances))


def _valid_first(chosen: Array, valid: Array) -> Array:
    """int32[B, N]: the numbers `chosen` of valid nodes, in order, then -1, so that a verify pass can be cut to them."""
    keep = (chosen >= 0) & take_along(valid, jnp.maximum(chosen, 0), 1)
    order = jnp.argsort(~keep, axis=1, stable=True)
    return jnp.where(take_along(keep, order, 1), take_along(chosen, order, 1), -1)
