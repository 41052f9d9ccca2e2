"""Growing a token tree level by level from a drafter that gives logits: one pass of the drafter per level.

A `Builder` decides which tokens to draft and which of them to look below; `grow` runs it against `feed`, the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array, Context, Draws, PyTree, TokenTree


class Parents(NamedTuple):
    """The nodes whose children are to be drafted, as the builder chose them in the level before."""

    ids: Array  # int32[B, F], node numbers; 0 is the root
    valid: Array  # bool[B, F]
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


class Grown(NamedTuple):
    """A tree and where its nodes lie in the drafter's memory."""

    tree: TokenTree
    places: Array  # int32[B, N]: node i is the places[:, i]-th token fed, the root the 0-th; -1: never fed


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
    ids = jnp.arange(total)

    def expand(state, level, nodes, valid, depth, logits):
        parents = Parents(nodes, valid, *_laws(builder, logits, keys, level, depth, context))
        state, new, log_q = builder.expand(state, level, parents)
        return state, new, log_q

    def record(grown, level, new: Level):
        """Write a level into the arrays of all nodes."""
        depth = jnp.take_along_axis(grown.depth, new.parents, 1) + 1
        seen = jnp.take_along_axis(grown.seen, new.parents[:, :, None], 1)  # what the parent saw, and the parent
        here = jnp.take_along_axis(grown.place, new.parents, 1)
        seen |= here[:, :, None] == jnp.arange(places)
        fresh = jnp.any(new.feed[:, None, :] == jnp.arange(w)[None, :, None], 2)  # [B, W]
        fresh &= level < builder.levels - 1  # nothing is fed below the last level
        slot = jnp.argmax(new.feed[:, None, :] == jnp.arange(w)[None, :, None], 2)
        place = jnp.where(fresh, 1 + level * f + slot, -1)
        values = _Nodes(new.tokens, new.parents, new.valid, depth, seen, place)
        write = lambda old, value: jax.lax.dynamic_update_slice_in_dim(old, value.astype(old.dtype), 1 + level * w, 1)
        return jax.tree.map(write, grown, values)

    def pass_(carry, level):
        """Feed the frontier of the level before and draft below it."""
        grown, state, memory, nodes = carry
        take = lambda x: jnp.take_along_axis(x, nodes, 1)
        depth, valid = take(grown.depth), take(grown.valid)
        seen = jnp.take_along_axis(grown.seen, nodes[:, :, None], 1)
        memory, logits = feed(memory, 1 + (level - 1) * f, take(grown.tokens), depth, seen)
        state, new, log_q = expand(state, level, nodes, valid, depth, logits)
        grown = record(grown, level, new)
        return (grown, state, memory, 1 + level * w + new.feed), log_q

    at_root = lambda value, *shape, dtype=jnp.int32: jnp.full((batch, *shape), value, dtype).at[:, 0]
    grown = _Nodes(
        tokens=at_root(0, total).set(root),
        parents=at_root(0, total).set(-1),
        valid=at_root(False, total, dtype=bool).set(True),
        depth=jnp.zeros((batch, total), jnp.int32),
        seen=jnp.zeros((batch, total, places), bool),
        place=at_root(-1, total).set(0),
    )
    start = jnp.zeros((batch, 1), jnp.int32)
    state, new, log_q = expand(builder.init(batch), 0, start, jnp.ones((batch, 1), bool), start, root_logits[:, None])
    grown = record(grown, 0, new)
    laws = None
    if builder.levels > 1:
        carry = grown, state, memory, 1 + new.feed
        (grown, state, memory, _), laws = jax.lax.scan(pass_, carry, jnp.arange(1, builder.levels))

    chosen = builder.finish(state, grown.parents, grown.valid)  # int32[B, N]
    new_place = jnp.max(
        jnp.where(chosen[:, :, None] == ids, jnp.arange(builder.num_nodes)[:, None], -1), 1
    )  # of each id
    take = lambda x: jnp.take_along_axis(x, jnp.maximum(chosen, 0), 1)
    parents = jnp.take_along_axis(new_place, jnp.maximum(take(grown.parents), 0), 1)
    first = jnp.arange(builder.num_nodes) == 0
    valid = (chosen >= 0) & take(grown.valid) & (take(grown.depth) <= limit[:, None]) | first
    tree = TokenTree(take(grown.tokens), jnp.where(first, -1, jnp.where(valid, parents, 0)).astype(jnp.int32), valid)
    place = jnp.where(chosen >= 0, take(grown.place), -1)
    if builder.draws != "point_mass" and context.sampling.temperature is not None and context.noise is None:
        rows = log_q if laws is None else jnp.concatenate([log_q, _by_row(laws)], 1)  # [B, places, V]
        fed = jnp.take_along_axis(rows, jnp.maximum(place, 0)[:, :, None], 1)
        tree = tree._replace(logits=jnp.where((place >= 0)[:, :, None], fed, 0.0))
    return Grown(tree, place), memory


class _Nodes(NamedTuple):
    tokens: Array  # int32[B, nodes]
    parents: Array  # int32[B, nodes]
    valid: Array  # bool[B, nodes]
    depth: Array  # int32[B, nodes]
    seen: Array  # bool[B, nodes, places]
    place: Array  # int32[B, nodes], order in which it is fed, or -1


def _by_row(laws: Array) -> Array:
    """[levels, B, F, V] -> [B, levels * F, V]."""
    laws = laws.swapaxes(0, 1)
    return laws.reshape(laws.shape[0], -1, laws.shape[-1])


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
