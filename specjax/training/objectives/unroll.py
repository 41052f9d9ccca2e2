"""A head is trained by what it is served by: rounds of drafting, from many places of a text at once.

From place t, the pair of x_t and its root x_{t+1}, the head's own `start` and `follow` draft a chain, of which the
tokens are those of the text: what follows a right draft. The rounds of a text share its keys and values and have
their own behind them, as a tree's nodes have. So the training pass is the decoder's for every head there is. Of EAGLE-3
that is its training-time test (arXiv 2503.01840): at step i the query of place t sees the pairs up to t and, of the
steps before, only its own.

    depth k of the round from t says x_{t+2+k}, which the target says of x_{t+1+k}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.models.heads.agreement import prompted_features
from specjax.models.heads.blocks import cache_of_rows
from specjax.models.heads.contract import Drafted, DraftHead, Head, Pairs, features_of
from specjax.training.data.packing import Lesson
from specjax.training.objectives.chunks import sum_in_chunks
from specjax.types import Array, Context, Model, Output, PyTree, Said, Target


class Reading(NamedTuple):
    """What the target says of a lesson."""

    features: Array  # [B, T, F] of the head's taps
    hidden: Array  # [B, T, D], behind its last norm
    pending: PyTree  # of its cache; None: left out, of a head that does not read it


class Depth(NamedTuple):
    """What N rounds say at one depth, and what is true."""

    logits: Array  # float32[N, v]
    label: Array  # int32[N], the place of the token that follows among the v; v: it has none there
    hidden: Array  # [N, D], of the target, which says that token
    weight: Array  # float32[N], 1 where the target wrote it
    confidence: Array | None  # float32[N]
    scratch: PyTree  # of the head, for losses of more than logits


def one_pass(model: Model, params: PyTree, lesson: Lesson, taps: tuple[int, ...] = ()) -> tuple[Output, PyTree]:
    """A pass over a lesson, each text of a row on its own: (output, pending)."""
    batch, size = lesson.tokens.shape
    place = jnp.arange(size)
    mask = (place <= place[:, None]) & (place >= jnp.asarray(lesson.first)[:, :, None])
    positions = jnp.broadcast_to(place, (batch, size))
    cache = model.begin(params, None, batch, 0)
    wanted = {"taps": taps} if taps else {}
    return model.forward(params, jnp.asarray(lesson.tokens), cache, positions=positions, mask=mask, **wanted)


def read(target: Target, head: Head, lesson: Lesson) -> Reading:
    """One pass of the target over a lesson. Nothing is derived from it."""
    return _read(target, lesson, head.taps)


def states(target: Target, lesson: Lesson, *, taps: tuple[int, ...]) -> Reading:
    """`read`, of any head with these taps for which the cache is nothing."""
    return _read(target, lesson, taps)._replace(pending=None)


def _read(target: Target, lesson: Lesson, taps: tuple[int, ...]) -> Reading:
    output, pending = one_pass(target.model, target.params, lesson, taps)
    return jax.lax.stop_gradient(Reading(features_of(output, taps), output.hidden, pending))


def rounds(
    head: Head,
    params: PyTree,
    target: Target,
    lesson: Lesson,
    reading: Reading,
    places: Array,
    depths: int,
    ids: Array | None,
    judge: Callable[[list[Depth]], Any],
    chunk: int | None = None,
) -> Any:
    """The sum of what `judge` says of all rounds, given those of a chunk by depth: any tree of arrays.

    Args:
      places: int32[B, R], where they begin; -1: nowhere, with weight 0. depths: how many tokens each drafts.
      ids: int32[V], the place of each token among those that the head drafts; None: they are the target's.
      chunk: how many of the R at a time, a divisor of R; what they say of the vocabulary is made again for the
        derivatives. None: all, and nothing is made again.
    """
    tokens, first = jnp.asarray(lesson.tokens), jnp.asarray(lesson.first)
    batch, count = places.shape
    begin = jnp.maximum(places, 0)
    features = reading.features
    if head.prompts is not None:  # it has no pass of its own: the target's pass over its prompts has the derivatives
        features = prompted_features(target, DraftHead(head, params), tokens, first)
    pairs = Pairs(features[:, :-1], tokens[:, 1:], begin + 1, first[:, :-1])
    nothing = Context(tokens, jnp.ones((batch,), jnp.int32), target=target)
    # Without room for any pair: what is read of all is not written into it, but stands in its place.
    memory = head.read(params, head.begin(params, nothing, batch, 0), pairs, nothing)
    whole = jax.tree.map(lambda axis, x: x.shape[axis] == batch * count, head.axes(memory), memory)

    def some(params, memory: PyTree, i: Array, size: int) -> Any:
        """Of `size` of the R places from i on."""

        def rows(x: Array, axis: int, own: bool) -> Array:
            if not own or size == count:
                return x
            split = x.reshape(*x.shape[:axis], batch, count, *x.shape[axis + 1 :])
            part = jax.lax.dynamic_slice_in_dim(split, i, size, axis + 1)
            return part.reshape(*x.shape[:axis], batch * size, *x.shape[axis + 1 :])

        held = jax.tree.map(rows, memory, head.axes(memory), whole)
        where = jax.lax.dynamic_slice_in_dim(places, i, size, 1)
        return judge(_by_depth(head, params, held, target, lesson, reading, where, depths, ids))

    return sum_in_chunks(some, count, chunk, params, memory)


def _by_depth(
    head: Head, params: PyTree, memory: PyTree, target: Target, lesson: Lesson, reading: Reading, places: Array,
    depths: int, ids: Array | None,
) -> list[Depth]:  # fmt: skip
    """What rounds from places int32[B, C] say at each depth, of B C rows."""
    tokens, first, counts = (jnp.asarray(x) for x in lesson)
    (batch, size), count = tokens.shape, places.shape[1]
    rows = lambda x: x.reshape(-1, *x.shape[2:])
    begin = jnp.maximum(places, 0)

    def at(x: Array, ahead: int) -> Array:
        """[B C, ..] of x [B, T, ..], so far ahead of each place."""
        place = jnp.minimum(begin + ahead, size - 1)
        return rows(take_along(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), 1))

    length = rows(begin) + 2
    cache = cache_of_rows(reading.pending, Pairs(reading.features, tokens, begin + 1, first))
    repeated = jnp.broadcast_to(tokens[:, None], (batch, count, size))
    context = Context(rows(repeated), length, cache=cache, target=target)
    place = jnp.arange(depths)
    said_by_depth = []
    scratch, said = head.start(params, memory, context, depths)
    for k in range(depths):
        if k:
            seen = jnp.broadcast_to((place > 0) & (place < k), (batch * count, 1, depths))
            depth = jnp.full((batch * count, 1), k, jnp.int32)
            drafted = Drafted(at(tokens, 1 + k)[:, None], depth, jnp.int32(k), depth - 1, seen)
            scratch, said = head.follow(params, scratch, drafted, context)
            said = jax.tree.map(lambda x: x[:, 0], said)
        said = said if isinstance(said, Said) else Said(said)
        right, ahead = at(tokens, 2 + k), begin + 2 + k
        same = rows((places >= 0) & (ahead < size)) & (at(first, 2 + k) == at(first, 0))
        label = right if ids is None else ids[right]
        weight = (same & at(counts, 2 + k)).astype(jnp.float32)
        said_by_depth.append(Depth(said.logits, label, at(reading.hidden, 1 + k), weight, said.confidence, scratch))
    return said_by_depth
