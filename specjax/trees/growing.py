"""Growth of a token tree level by level from a drafter that returns logits, with one drafter pass per level.

A `Builder` selects the tokens to draft and the nodes to expand. `grow` runs it with `feed`, the drafter's pass. Growth
ends when no row has nodes to expand, because of its limit or the builder's `Stop`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import platforms, scopes
from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import LogitRows, by_index
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.trees.contracts import SHORTLIST, Builder, Fed, FeedFn, Frontier, Level, Parents, exclude, noise_at
from specjax.types import Array, Context, DraftOutput, PyTree, Sampling, TokenTree

LogitsFn = Callable[[PyTree], Array]
"""A drafter's output layer: `(states of R nodes [B, R, ...]) -> logits float[B, R, V]`."""


class GrownTree(NamedTuple):
    """A tree and the indices of its nodes in the drafter's memory."""

    tree: TokenTree  # with `DraftStates` in place of logits if the drafter returns states; see `read_states`
    # int32[B, N]: node i is the places[:, i]-th fed token, and the root is the 0-th; -1: not fed. The deepest node of a
    # path may never have been fed.
    places: Array
    # float32[B, N], for scored builders: the drafter's acceptance probability of each node, given its parent's.
    chances: Array | None = None
    details: PyTree = None  # arrays [B, N, ...], see `Builder.details`; those of the root and of missing nodes are any


def grow(
    builder: Builder,
    feed: FeedFn | None,
    memory: PyTree,
    root: Array,
    output: Array | DraftOutput,
    keys: Array | None,
    context: Context,
    limit: Array,
    logits_of: LogitsFn | None = None,
    *,
    is_path_free: bool = False,
    pass_costs: np.ndarray | None = None,
) -> tuple[GrownTree, PyTree]:
    """Draft a tree below `root` int32[B].

    Args:
      feed: runs the drafter on the frontier of each level; not called for trees of one level. memory: state of `feed`.
      output: the drafter's output at the root: logits float32[B, V], or a DraftOutput with confidence float32[B].
      logits_of: the drafter's output layer. `output` and the outputs of `feed` then are its input states, in place of
        logits, because the logits are too large to be stored.
      keys: [B]; None: greedy. context: sampling settings of the target; `context.noise` shares the target's noise.
      limit: int32[B], deepest level.
      pass_costs: float32[D + 1], costs of target passes for stop conditions; see `Fed`.
      is_path_free: True if the output depends on the depth of a node only, not on the tokens above it.

    Returns: the tree, and the memory. Raises: UsageError for a builder that needs `is_path_free`.
    """
    if builder.shorten is not None and not is_path_free:
        raise UsageError(
            "ddtree and drawn trees need a head whose slots do not see each other's tokens; choose eagle2:KxLxN instead"
        )
    inputs = _Inputs(builder, keys, context, limit, logits_of, pass_costs)
    output = _as_output(jax.tree.map(lambda x: x[:, None], output))
    carry = _expand(inputs, _start(inputs, root, memory, LogitRows(output.logits, logits_of)), output)
    if builder.levels > 1:
        assert feed is not None
        with jax.named_scope(scopes.LEVELS):
            has_work = _has_levels if _is_static(builder, context) else _has_work
            level = functools.partial(_level, inputs, feed)
            carry = jax.lax.while_loop(functools.partial(has_work, builder), level, carry)
    return _finish(builder, carry), carry.memory


class DraftStates(NamedTuple):
    """States of the drafter by node, from which the logits of a tree are computed."""

    states: PyTree  # [B, N, ...], the inputs of the output layer
    excluded: Array  # int32[B, N, `Builder.excludes`], see `Level.excluded`


def read_states(builder: Builder, tree: TokenTree, logits_of: LogitsFn, sampling: Sampling) -> TokenTree:
    """Return a grown tree whose logits are computed when they are read, if they are not stored.

    The rows of nodes without drafts below them may have any value.
    """
    if not isinstance(tree.logits, DraftStates):
        return tree

    def compute(stored: DraftStates) -> Array:
        return exclude(_log_q(builder, sampling, logits_of(stored.states)), stored.excluded)

    return tree._replace(logits=LogitRows(tree.logits, compute))


class _Inputs(NamedTuple):
    """Inputs that are the same for all levels."""

    builder: Builder
    keys: Array | None  # [B]
    context: Context
    limit: Array  # int32[B]
    logits_of: LogitsFn | None
    pass_costs: np.ndarray | None


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
    confidence: Array | None  # float32[B, nodes], see `TokenTree`


class _Carry(NamedTuple):
    level: Array  # int32[], level of the nodes to draft
    nodes: Array  # int32[B, F], the frontier: nodes to draft below
    grown: _Nodes
    state: PyTree  # state of the builder
    memory: PyTree  # memory of the drafter
    log_q: Array | DraftStates | None  # float32[B, places, V], log q below the fed nodes


def _start(inputs: _Inputs, root: Array, memory: PyTree, rows: LogitRows) -> _Carry:
    """Return the carry with only the root, which is the first frontier. `rows` are its logits [B, 1, V]."""
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
        confidence=number(1.0) if builder.keep_confidence else None,
    )
    is_sampled = context.sampling.temperature is not None and context.noise is None
    keep_logits = builder.draws != "point_mass" and (builder.keep_logits or is_sampled)
    log_q = _empty_log_q(builder, rows) if keep_logits else None
    return _Carry(jnp.int32(0), jnp.zeros((batch, 1), jnp.int32), grown, builder.init(batch), memory, log_q)


def _empty_log_q(builder: Builder, rows: LogitRows) -> Array | DraftStates:
    batch, _, vocab = rows.shape
    if rows.compute is None:
        return jnp.zeros((batch, builder.places, vocab))
    states = jax.tree.map(lambda x: jnp.zeros((batch, builder.places, *x.shape[2:]), x.dtype), rows.states)
    return DraftStates(states, jnp.full((batch, builder.places, builder.excludes), vocab, jnp.int32))


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


def _as_output(output: PyTree) -> DraftOutput:
    return output if isinstance(output, DraftOutput) else DraftOutput(output)


def _expand(inputs: _Inputs, carry: _Carry, output: Array | DraftOutput) -> _Carry:
    """Draft below the frontier from the drafter's output on it, and record the nodes to feed next."""
    builder, level, nodes = inputs.builder, carry.level, carry.nodes
    depth = take_along(carry.grown.depth, nodes, 1)
    output, sampling_of_text = _as_output(output), inputs.context.sampling
    log_q_of = lambda logits: _log_q(builder, sampling_of_text, logits)
    if inputs.logits_of is None:
        rows = LogitRows(log_q_of(output.logits))
        log_q_of = lambda logits: rows.states  # computed once
    else:
        logits_of = inputs.logits_of
        rows = LogitRows(output.logits, lambda states: log_q_of(logits_of(states)))
    grown, expands = _judge(inputs, carry.grown, nodes, depth, output, log_q_of)
    keys = _noise_keys(inputs, level, depth)
    is_greedy = None if keys is None else sampling.is_greedy(sampling_of_text, len(nodes))
    is_coupled = inputs.context.noise is not None
    shortlist = SHORTLIST if is_coupled and builder.scored else None
    parents = Parents(nodes, expands, rows, keys, is_coupled, is_greedy, shortlist)
    state, drafted = builder.expand(carry.state, level, parents)
    chances = _chances(builder, parents, drafted, output.confidence) if builder.scored else None
    log_q = None if carry.log_q is None else _store(builder, carry.log_q, level, rows, drafted)
    following = 1 + level * builder.width + drafted.feed
    confidence = _confidence(parents, drafted, output) if builder.keep_confidence else None
    grown = _record(inputs, grown, level, drafted, chances, confidence)
    return _Carry(level + 1, following, grown, state, carry.memory, log_q)


def _store(builder: Builder, log_q: Array | DraftStates, level: Array, rows: LogitRows, new: Level) -> PyTree:
    """Store the distributions of the frontier, or the states that they are computed from."""
    place = jnp.where(level > 0, 1 + (level - 1) * builder.frontier, 0)
    write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, place, 1)
    if isinstance(log_q, DraftStates):
        states = jax.tree.map(write, log_q.states, rows.states)
        return DraftStates(states, log_q.excluded if new.excluded is None else write(log_q.excluded, new.excluded))
    return write(log_q, rows.states if new.excluded is None else exclude(rows.states, new.excluded))


def _confidence(parents: Parents, new: Level, output: DraftOutput) -> Array:
    """Return float32[B, W]: the drafter's confidence in the nodes drafted below the frontier.

    Raises: UsageError for a drafter without one.
    """
    if output.confidence is None:
        raise UsageError(
            "the controller budget and keep_confidence need a head with a trained confidence, such as dspark; "
            "leave them out"
        )
    return take_along(output.confidence, _slots(parents.ids, new), 1)


def _slots(frontier: Array, new: Level) -> Array:
    """Return int32[B, W]: the index of each drafted node's parent in the frontier int32[B, F]."""
    return jnp.argmax(new.parents[:, :, None] == frontier[:, None, :], 2)


def _chances(builder: Builder, parents: Parents, new: Level, confidence: Array | None) -> Array:
    """Return float32[B, W]: acceptance probabilities of the nodes drafted below the frontier.

    The children of the frontier have the distributions `parents.rows`, log q [B, F, V]. A drafter's `confidence` [B, F]
    is the acceptance probability of the likeliest child. The other children get a share in proportion to q. In coupled
    decoding, a child with noise has the probability that no other token beats it, and siblings share it.
    """
    nodes = parents.ids
    slot = _slots(nodes, new)
    tokens = jnp.broadcast_to(new.tokens[:, None, :], (*nodes.shape, new.tokens.shape[1]))
    log_p, top = parents.rows.reduce(lambda log_q, tokens: (take_along(log_q, tokens, 2), jnp.max(log_q, -1)), tokens)
    log_p = take_along(log_p, slot[:, None, :], 1)[:, 0]  # of each child below its own parent
    if parents.coupled and parents.keys is not None and builder.draws != "point_mass":
        keys = parents.keys[jnp.arange(len(nodes))[:, None], slot]
        noise = noise_at(keys, new.tokens[..., None])[..., 0]
        return parents.unless_greedy(_race_chances(log_p, noise, slot, new.valid), jnp.exp(log_p))
    if confidence is None:
        return jnp.exp(log_p)
    return jnp.exp(log_p - take_along(top, slot, 1)) * take_along(confidence, slot, 1)


def _race_chances(log_p: Array, noise: Array, slot: Array, valid: Array) -> Array:
    """Return float32[B, W]: the probability that no token but the siblings beats a node, times its share among them.

    Args:
      log_p: float32[B, W]. noise: float32[B, W]. slot: int32[B, W], the parents. valid: bool[B, W].
    """
    score = jnp.exp(jnp.clip(log_p + noise, -60, 60))
    is_sibling = (slot[:, :, None] == slot[:, None, :]) & valid[:, None, :]
    share = score / jnp.maximum(jnp.sum(jnp.where(is_sibling, score[:, None, :], 0.0), 2), score)
    return share * jnp.exp(-(1 - jnp.exp(log_p)) / score)


def _log_q(builder: Builder, settings: Sampling, logits: Array) -> Array:
    """Return log q float32[B, R, V], the distributions of the children of R nodes, from the drafter's logits."""
    if builder.warped and settings.temperature is not None:  # greedy rows are not warped: one token would remain
        is_greedy = sampling.is_greedy(settings, len(logits))[:, None, None]
        logits = jnp.where(is_greedy, logits, sampling.warp(logits, settings))
    return jax.nn.log_softmax(logits.astype(jnp.float32), -1)


def _noise_keys(inputs: _Inputs, level: Array, depth: Array) -> Array | None:
    """Return the keys [B, F] of the noise of the children of nodes at `depth` int32[B, F]; None: no noise."""
    context = inputs.context
    if context.sampling.temperature is None:
        return None
    if context.noise is not None:  # the noise of the target's draw at the children's position
        return sampling.node_keys(context.noise, context.length, depth)
    split = lambda key: jax.random.split(jax.random.fold_in(key, level), depth.shape[1])
    return jax.vmap(split)(inputs.keys)


def _judge(
    inputs: _Inputs, grown: _Nodes, nodes: Array, depth: Array, output: DraftOutput, log_q_of: LogitsFn
) -> tuple[_Nodes, Array]:
    """Apply the stop condition to the frontier `nodes` int32[B, F], and return bool[B, F]: the nodes to draft below."""
    stop, take = inputs.builder.stop, lambda x: take_along(x, nodes, 1)
    expands = take(grown.expands)
    if stop is None:
        return grown, expands

    def judge(logits, value, depth, confidence, accepted, expands):
        fed = Fed(log_q_of(logits), depth, logits, confidence, accepted, expands, inputs.pass_costs)
        return stop.judge(value, fed)

    value = jax.tree.map(take, grown.value)
    logits = LogitRows(output.logits, inputs.logits_of)
    value, go_on = logits.reduce(judge, value, depth, output.confidence, output.accepted, expands)
    expands = expands if stop.keeps else expands & go_on
    rows = jnp.arange(nodes.shape[0])[:, None]
    write = lambda old, new: old.at[rows, nodes].set(new)
    value = jax.tree.map(write, grown.value, value)
    return grown._replace(value=value, go_on=write(grown.go_on, go_on), expands=write(grown.expands, expands)), expands


def _record(
    inputs: _Inputs, grown: _Nodes, level: Array, new: Level, chances: Array | None, confidence: Array | None
) -> _Nodes:
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
        confidence=confidence,
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
    if grown.confidence is not None:
        tree = tree._replace(confidence=take(grown.confidence))
    place = jnp.where(nodes >= 0, take(grown.place), -1)
    if carry.log_q is not None and builder.shorten is not None:
        # The places are the depths. All nodes of a depth have one row, which is stored once.
        depth = jnp.minimum(take(grown.depth), builder.places - 1)
        by_depth = carry.log_q
        log_q: Any = (
            LogitRows(by_depth).take(depth).states if isinstance(by_depth, DraftStates) else by_index(by_depth, depth)
        )
        tree = tree._replace(logits=log_q)
    elif carry.log_q is not None:
        # A node without drafts below it may have been fed because of other rows, so its logits are set to 0.
        fed = (place >= 0) & take(grown.expands)
        log_q = LogitRows(carry.log_q).take(jnp.maximum(place, 0)).states
        if not isinstance(log_q, DraftStates):
            log_q = jnp.where(fed[:, :, None], log_q, 0.0)
        tree = tree._replace(logits=log_q)
    details = None
    if builder.details is not None:
        at = lambda x: take_along(x, jnp.maximum(nodes - 1, 0).reshape(*nodes.shape, *[1] * (x.ndim - 2)), 1)
        details = jax.tree.map(at, builder.details(carry.state))
    return GrownTree(tree, place, None if grown.chances is None else take(grown.chances), details)


def _valid_first(nodes: Array, valid: Array) -> Array:
    """Move the valid node numbers of int32[B, N] to the front, then -1, so that a target pass can be cut to them."""
    keep = (nodes >= 0) & take_along(valid, jnp.maximum(nodes, 0), 1)
    order = jnp.argsort(~keep, axis=1, stable=True)
    return jnp.where(take_along(keep, order, 1), take_along(nodes, order, 1), -1)
