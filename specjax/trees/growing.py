"""Growth of a token tree level by level from a drafter that returns logits, with one drafter pass per level.

A `Builder` selects the tokens to draft and the nodes to expand. `grow` runs it with `feed`, the drafter's pass. Growth
ends when no row has nodes to expand, because of its limit or the builder's `Stop`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import platforms, scopes
from specjax.arrays.indexing import gather_at, take_along
from specjax.numerics import sampling
from specjax.trees.contracts import Builder, Fed, FeedFn, Frontier, Level, Parents, Stop
from specjax.types import Array, Context, DraftOutput, PyTree, TokenTree


class GrownTree(NamedTuple):
    """A tree and the indices of its nodes in the drafter's memory."""

    tree: TokenTree
    # int32[B, N]: node i is the places[:, i]-th fed token, and the root is the 0-th; -1: not fed. The deepest node of a
    # path may never have been fed.
    places: Array
    # float32[B, N], for scored builders: the drafter's acceptance probability of each node, given its parent's.
    chances: Array | None = None


def grow(
    builder: Builder,
    feed: FeedFn | None,
    memory: PyTree,
    root: Array,
    output: Array | DraftOutput,
    keys: Array | None,
    context: Context,
    limit: Array,
) -> tuple[GrownTree, PyTree]:
    """Draft a tree below `root` int32[B].

    Args:
      feed: runs the drafter on the frontier of each level; not called for trees of one level. memory: state of `feed`.
      output: the drafter's output at the root: logits float32[B, V], or a DraftOutput with confidence float32[B].
      keys: [B]; None: greedy. context: sampling settings of the target; `context.noise` shares the target's noise.
      limit: int32[B], deepest level.

    Returns: the tree, and the memory.
    """
    inputs = _Inputs(builder, keys, context, limit)
    output = jax.tree.map(lambda x: x[:, None], output)
    carry = _expand(inputs, _start(inputs, root, memory, _logits(output).shape[-1]), output)
    if builder.levels > 1:
        assert feed is not None
        with jax.named_scope(scopes.LEVELS):
            has_work = _has_levels if _is_static(builder, context) else _has_work
            level = functools.partial(_level, inputs, feed)
            carry = jax.lax.while_loop(functools.partial(has_work, builder), level, carry)
    return _finish(builder, carry), carry.memory


class _Inputs(NamedTuple):
    """Inputs that are the same for all levels."""

    builder: Builder
    keys: Array | None  # [B]
    context: Context
    limit: Array  # int32[B]


class _Nodes(NamedTuple):
    """All nodes so far, numbered as in `Builder`."""

    tokens: Array  # int32[B, nodes]
    parents: Array  # int32[B, nodes]
    valid: Array  # bool[B, nodes]
    depth: Array  # int32[B, nodes]
    visible: Array  # bool[B, nodes, places], fed tokens that the node may attend to
    place: Array  # int32[B, nodes], index among the fed tokens, or -1
    expands: Array  # bool[B, nodes], nodes to draft below, as decided so far
    go_on: Array  # bool[B, nodes], the stop condition's decision on the children
    # float32[B, nodes] each, value of the stop condition: the parent's until the node is fed, then its children's.
    value: PyTree
    chances: Array | None  # float32[B, nodes], see `GrownTree`


class _Carry(NamedTuple):
    level: Array  # int32[], level of the nodes to draft
    nodes: Array  # int32[B, F], the frontier: nodes to draft below
    grown: _Nodes
    state: PyTree  # state of the builder
    memory: PyTree  # memory of the drafter
    log_q: Array | None  # float32[B, places, V], log q below the fed nodes


def _start(inputs: _Inputs, root: Array, memory: PyTree, vocab: int) -> _Carry:
    """Return the carry with only the root, which is the first frontier."""
    builder, context, batch = inputs.builder, inputs.context, root.shape[0]
    at_root = lambda value, dtype=jnp.int32: jnp.full((batch, builder.size), value, dtype).at[:, 0]
    number = lambda start: jnp.full((batch, builder.size), start, jnp.float32)
    grown = _Nodes(
        tokens=at_root(0).set(root),
        parents=at_root(0).set(-1),
        valid=at_root(False, bool).set(True),
        depth=jnp.zeros((batch, builder.size), jnp.int32),
        visible=jnp.zeros((batch, builder.size, builder.places), bool),
        place=at_root(-1).set(0),
        expands=at_root(False, bool).set(inputs.limit > 0),
        go_on=jnp.ones((batch, builder.size), bool),
        value=() if builder.stop is None else jax.tree.map(number, builder.stop.start),
        chances=number(1.0) if builder.scored else None,
    )
    is_sampled = context.sampling.temperature is not None and context.noise is None
    keep_logits = builder.draws != "point_mass" and (builder.keep_logits or is_sampled)
    log_q = jnp.zeros((batch, builder.places, vocab)) if keep_logits else None
    return _Carry(jnp.int32(0), jnp.zeros((batch, 1), jnp.int32), grown, builder.init(batch), memory, log_q)


def _is_static(builder: Builder, context: Context) -> bool:
    """Return True if the loop over the levels gets a fixed length, at which no draft of this builder ends early.

    On a GPU the host reads a condition that depends on data before each level. A level without work is computed in
    vain, but such levels only occur at the end of a text.
    """
    ends_early = builder.prunes or builder.stop is not None or builder.is_open is not None
    return platforms.of_program() == "gpu" and context.unlimited is not None and not ends_early


def _has_levels(builder: Builder, carry: _Carry) -> Array:
    return carry.level < builder.levels


def _has_work(builder: Builder, carry: _Carry) -> Array:
    """Return bool[]: True if any row has nodes to expand."""
    expands = take_along(carry.grown.expands, carry.nodes, 1)
    work = jnp.any(expands) if builder.is_open is None else jnp.any(expands) | jnp.any(builder.is_open(carry.state))
    return (carry.level < builder.levels) & work


def _level(inputs: _Inputs, feed: FeedFn, carry: _Carry) -> _Carry:
    """Feed the frontier of the previous level and draft below it."""
    grown = carry.grown
    take = lambda x: take_along(x, carry.nodes, 1)
    place = 1 + (carry.level - 1) * inputs.builder.frontier
    visible = take_along(grown.visible, carry.nodes[:, :, None], 1)
    frontier = Frontier(place, take(grown.tokens), take(grown.depth), visible, take(grown.expands))
    memory, output = feed(carry.memory, frontier)
    return _expand(inputs, carry._replace(memory=memory), output)


def _logits(output: Array | DraftOutput) -> Array:
    return output.logits if isinstance(output, DraftOutput) else output


def _expand(inputs: _Inputs, carry: _Carry, output: Array | DraftOutput) -> _Carry:
    """Draft below the frontier from the drafter's output on it, and record the nodes to feed next."""
    builder, level, nodes = inputs.builder, carry.level, carry.nodes
    depth = take_along(carry.grown.depth, nodes, 1)
    output = output if isinstance(output, DraftOutput) else DraftOutput(output)
    log_q, noise = _distribution(inputs, output.logits, level, depth)
    fed = Fed(log_q, depth, output.logits, output.confidence, output.accepted)
    grown, expands = _judge(builder.stop, carry.grown, nodes, fed)
    is_greedy = None if noise is None else sampling.is_greedy(inputs.context.sampling, len(nodes))
    parents = Parents(nodes, expands, log_q, noise, inputs.context.noise is not None, is_greedy)
    state, drafted, drawn = builder.expand(carry.state, level, parents)
    chances = _chances(nodes, drafted, log_q, output.confidence) if builder.scored else None
    log_q_fed = carry.log_q
    if log_q_fed is not None:
        place = jnp.where(level > 0, 1 + (level - 1) * builder.frontier, 0)
        log_q_fed = jax.lax.dynamic_update_slice_in_dim(log_q_fed, drawn, place, 1)
    following = 1 + level * builder.width + drafted.feed
    return _Carry(level + 1, following, _record(inputs, grown, level, drafted, chances), state, carry.memory, log_q_fed)


def _chances(nodes: Array, new: Level, log_q: Array, confidence: Array | None) -> Array:
    """Return float32[B, W]: acceptance probabilities of the nodes drafted below the frontier `nodes`.

    The children of the frontier have the distribution `log_q` [B, F, V]. A drafter's `confidence` [B, F] is the
    acceptance probability of the likeliest child. The other children get a share in proportion to q.
    """
    slot = jnp.argmax(new.parents[:, :, None] == nodes[:, None, :], 2)  # the parents' indices in the frontier
    log_p = gather_at(log_q, jnp.arange(len(nodes))[:, None], slot, new.tokens)
    if confidence is None:
        return jnp.exp(log_p)
    return jnp.exp(log_p - take_along(jnp.max(log_q, -1), slot, 1)) * take_along(confidence, slot, 1)


def _distribution(inputs: _Inputs, logits: Array, level: Array, depth: Array) -> tuple[Array, Array | None]:
    """Return log q float32[B, F, V] of the children of nodes at `depth` int32[B, F], and their noise keys [B, F]."""
    builder, context = inputs.builder, inputs.context
    normalised = lambda x: jax.nn.log_softmax(x.astype(jnp.float32), -1)
    if context.sampling.temperature is None:
        return normalised(logits), None
    if builder.warped:  # greedy rows are not warped: one token would remain
        is_greedy = sampling.is_greedy(context.sampling, len(depth))[:, None, None]
        logits = jnp.where(is_greedy, logits, sampling.warp(logits, context.sampling))
    log_q = normalised(logits)
    if context.noise is not None:  # the noise of the target's draw at the children's position
        return log_q, sampling.node_keys(context.noise, context.length, depth)
    split = lambda key: jax.random.split(jax.random.fold_in(key, level), depth.shape[1])
    return log_q, jax.vmap(split)(inputs.keys)


def _judge(stop: Stop | None, grown: _Nodes, nodes: Array, fed: Fed) -> tuple[_Nodes, Array]:
    """Apply the stop condition to the frontier `nodes` int32[B, F], and return bool[B, F]: the nodes to draft below."""
    take = lambda x: take_along(x, nodes, 1)
    expands = take(grown.expands)
    if stop is None:
        return grown, expands
    value, go_on = stop.judge(jax.tree.map(take, grown.value), fed)
    expands = expands if stop.keeps else expands & go_on
    rows = jnp.arange(nodes.shape[0])[:, None]
    write = lambda old, new: old.at[rows, nodes].set(new)
    value = jax.tree.map(write, grown.value, value)
    return grown._replace(value=value, go_on=write(grown.go_on, go_on), expands=write(grown.expands, expands)), expands


def _record(inputs: _Inputs, grown: _Nodes, level: Array, new: Level, chances: Array | None) -> _Nodes:
    """Write a level into the arrays of all nodes."""
    builder = inputs.builder
    of_parent = lambda x: take_along(x, new.parents, 1)
    depth = of_parent(grown.depth) + 1
    visible = take_along(grown.visible, new.parents[:, :, None], 1)  # the tokens visible to the parent, and the parent
    visible |= of_parent(grown.place)[:, :, None] == jnp.arange(builder.places)
    is_fed = new.feed[:, None, :] == jnp.arange(builder.width)[:, None]  # [B, W, F]
    fed = jnp.any(is_fed, 2) & (level < builder.levels - 1)  # the last level is not fed
    place = jnp.where(fed, 1 + level * builder.frontier + jnp.argmax(is_fed, 2), -1)
    valid = new.valid & of_parent(grown.expands)
    expands = valid & (depth < inputs.limit[:, None]) & of_parent(grown.go_on)
    values = _Nodes(
        tokens=new.tokens,
        parents=new.parents,
        valid=valid,
        depth=depth,
        visible=visible,
        place=place,
        expands=expands,
        go_on=jnp.ones_like(expands),
        value=jax.tree.map(of_parent, grown.value),
        chances=chances,
    )
    start = 1 + level * builder.width
    write = lambda old, value: jax.lax.dynamic_update_slice_in_dim(old, value.astype(old.dtype), start, 1)
    return jax.tree.map(write, grown, values)


def _finish(builder: Builder, carry: _Carry) -> GrownTree:
    """Return the tree of the nodes that the builder selects."""
    grown = carry.grown
    nodes = builder.finish(carry.state, grown.parents, grown.valid)  # int32[B, N]
    if not builder.scored:
        nodes = _valid_first(nodes, grown.valid)
    new_place = jnp.max(
        jnp.where(nodes[:, :, None] == jnp.arange(grown.tokens.shape[1]), jnp.arange(builder.num_nodes)[:, None], -1),
        1,
    )  # int32[B, nodes], new index of each node
    take = lambda x: take_along(x, jnp.maximum(nodes, 0), 1)
    parents = take_along(new_place, jnp.maximum(take(grown.parents), 0), 1)
    first = jnp.arange(builder.num_nodes) == 0
    valid = (nodes >= 0) & take(grown.valid) | first
    tree = TokenTree(take(grown.tokens), jnp.where(first, -1, jnp.where(valid, parents, 0)).astype(jnp.int32), valid)
    place = jnp.where(nodes >= 0, take(grown.place), -1)
    if carry.log_q is not None:
        # A node without drafts below it may have been fed because of other rows, so its logits are set to 0.
        fed = (place >= 0) & take(grown.expands)
        rows = take_along(carry.log_q, jnp.maximum(place, 0)[:, :, None], 1)
        tree = tree._replace(logits=jnp.where(fed[:, :, None], rows, 0.0))
    return GrownTree(tree, place, None if grown.chances is None else take(grown.chances))


def _valid_first(nodes: Array, valid: Array) -> Array:
    """Move the valid node numbers of int32[B, N] to the front, then -1, so that a target pass can be cut to them."""
    keep = (nodes >= 0) & take_along(valid, jnp.maximum(nodes, 0), 1)
    order = jnp.argsort(~keep, axis=1, stable=True)
    return jnp.where(take_along(keep, order, 1), take_along(nodes, order, 1), -1)
