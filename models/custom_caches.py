"""What a user's own model remembers: the text itself, or the slots of its own cache.

Both are fields of a `Model`, made from `call(params, tokens, positions=, mask=, cache=) -> (logits, cache)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models.bridge import check_no_inputs
from specjax.types import Array, Capabilities, Output, PyTree

SIZES = (2, 128), (3, 256)
"""Rows and slots of the caches that are compared, to find the axes of both: whole tiles, as some round their slots."""


class Text(NamedTuple):
    """The first `length[b]` tokens of row b; what lies beyond is never read."""

    tokens: Array  # int32[B, S]
    length: Array  # int32[B]


class Unread(NamedTuple):
    """T new tokens."""

    tokens: Array  # int32[B, T]
    positions: Array  # int32[B, T]


class Slots(NamedTuple):
    """The arrays of a user's cache, [B, S, ...] each, with the first `length[b]` tokens of row b."""

    held: tuple[Array, ...]
    length: Array  # int32[B]


def of_text(call: Callable[..., Any], name: str, max_positions: int, trees: bool) -> dict[str, Any]:
    """Of a model that reads its whole text in every pass."""

    def begin(params, inputs, batch, capacity):
        check_no_inputs(name, inputs)
        return Text(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def forward(params, tokens, cache, *, positions, mask, earlier=None):
        new = Unread(tokens, positions)
        pending = new if earlier is None else jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), earlier, new)
        read = _tree_behind if trees else _chain_behind
        text, positions, seen, place = read(cache, pending, mask, max_positions)
        logits, _ = call(params, text, positions=positions, mask=seen, cache=None)
        return _output(take_along(logits, place[:, :, None], 1)), new

    def commit(cache, pending, path, num_nodes):
        tokens = _append(cache.tokens, pending.tokens, cache.length, path, num_nodes)
        return Text(tokens, cache.length + num_nodes)

    return {"begin": begin, "forward": forward, "commit": commit, "rewind": rewind, "capabilities": _able(trees)}


def of_slots(
    call: Callable[..., Any], name: str, max_positions: int, trees: bool, make_cache: Callable[[int, int], PyTree]
) -> dict[str, Any]:
    """Of a model with a cache of its own, which all rows fill from the same slot on.

    Here each row has a length of its own. So a pass gets a longer cache: what is committed, what is pending, and slots
    for the new tokens, with a mask of who sees which; what it wrote into the last ones is pending. That copies the
    cache, once per pass.
    """
    layout = _layout(make_cache, name)

    def begin(params, inputs, batch, capacity):
        check_no_inputs(name, inputs)
        return Slots(layout.taken(make_cache(batch, capacity)), jnp.zeros((batch,), jnp.int32))

    def forward(params, tokens, cache, *, positions, mask, earlier=None):
        batch, count = tokens.shape
        room = [x[:, :count] for x in layout.taken(make_cache(batch, count))]
        parts = [cache.held, room] if earlier is None else [cache.held, earlier, room]
        whole = [jnp.concatenate(same, 1) for same in zip(*parts, strict=True)]
        slots = whole[0].shape[1]
        committed = jnp.arange(cache.held[0].shape[1]) < cache.length[:, None]  # bool[B, S]
        seen = jnp.concatenate([jnp.broadcast_to(committed[:, None], (batch, count, committed.shape[1])), mask], 2)
        filled = layout.filled(make_cache(batch, count), whole, slots - count)
        positions = _within(positions, max_positions)
        logits, after = call(params, tokens, positions=positions, mask=seen, cache=filled)
        if jax.tree.structure(after) != layout.structure:
            raise UsageError(f"{name} must give its cache beside the logits, in the form in which it got it")
        return _output(logits), tuple(x[:, slots - count :] for x in layout.taken(after))

    def commit(cache, pending, path, num_nodes):
        write = lambda x, new: _append(x, new, cache.length, path, num_nodes)
        return Slots(tuple(map(write, cache.held, pending)), cache.length + num_nodes)

    return {"begin": begin, "forward": forward, "commit": commit, "rewind": rewind, "capabilities": _able(trees)}


def rewind(cache: Text | Slots, length: Array) -> Text | Slots:
    """Forget all but the first `length[b]` tokens of row b."""
    return cache._replace(length=jnp.minimum(cache.length, length))


def _able(trees: bool) -> Capabilities:
    return Capabilities(trees=trees)


def _output(logits: Array) -> Output:
    """Without the hidden states, which the model does not give."""
    return Output(logits, jnp.zeros((*logits.shape[:2], 1)))


def _within(positions: Array, max_positions: int) -> Array:
    """Those of padding may be beyond what the model reads, and `nnx.Embed` makes NaN of them, which no mask hides."""
    return jnp.minimum(positions, max_positions - 1)


def _append(held: Array, new: Array, length: Array, path: Array, num_nodes: Array) -> Array:
    """`held` [B, S, ...] with nodes `path[b, :num_nodes[b]]` of `new` [B, T, ...] from `length[b]` on."""
    index = jnp.arange(path.shape[1])
    chosen = take_along(new, jnp.maximum(path, 0).reshape(*path.shape, *[1] * (new.ndim - 2)), 1)
    slot = jnp.where(index < num_nodes[:, None], length[:, None] + index, held.shape[1])
    return held.at[jnp.arange(len(path))[:, None], slot].set(chosen.astype(held.dtype), mode="drop")


def _chain_behind(cache: Text, pending: Unread, mask: Array, max_positions: int):
    """The text [B, L], continued by the deepest of the new tokens and those above it: (text, positions, mask, the place
    of each new token [B, T]). mask: bool[B, T, P + T]."""
    batch, size = cache.tokens.shape
    depth = jnp.sum(mask, 2, dtype=jnp.int32)  # int32[B, T], 1 of one that follows what is committed
    on_chain = take_along(mask, jnp.argmax(depth, 1)[:, None, None], 1)[:, 0]  # bool[B, P + T]
    width = min(size + on_chain.shape[1], max_positions)
    place = cache.length[:, None] + jnp.cumsum(on_chain, 1) - 1
    text = jnp.pad(cache.tokens, ((0, 0), (0, on_chain.shape[1])))[:, :width]
    text = text.at[jnp.arange(batch)[:, None], jnp.where(on_chain, place, width)].set(pending.tokens, mode="drop")
    positions = jnp.broadcast_to(jnp.arange(width), text.shape)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
    return text, positions, causal, jnp.minimum(cache.length[:, None] + depth - 1, width - 1)


def _tree_behind(cache: Text, pending: Unread, mask: Array, max_positions: int):
    """The buffer of the text and behind it all that is pending: as `_chain_behind`, with the mask of the tree."""
    batch, size = cache.tokens.shape
    count, new = pending.tokens.shape[1], mask.shape[1]
    among = jnp.concatenate([_among_earlier(mask, pending.positions), mask], 1)  # bool[B, P + T, P + T]
    held = jnp.broadcast_to((jnp.arange(size) < cache.length[:, None])[:, None], (batch, count, size))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size + count), bool)), (batch, size, size + count))
    seen = jnp.concatenate([causal, jnp.concatenate([held, among], 2)], 1)
    place = jnp.broadcast_to(jnp.arange(size), (batch, size))
    positions = _within(jnp.concatenate([place, pending.positions], 1), max_positions)
    text = jnp.concatenate([cache.tokens, pending.tokens], 1)
    return text, positions, seen, jnp.broadcast_to(size + count - new + jnp.arange(new), (batch, new))


def _among_earlier(mask: Array, positions: Array) -> Array:
    """bool[B, P, P + T]: of the P tokens that were pending before, each sees itself and those that a new token sees
    along with it, if they are above. mask: bool[B, T, P + T]; positions: int32[B, P + T]."""
    count = mask.shape[2] - mask.shape[1]
    together = jnp.einsum("btp,bts->bps", mask[:, :, :count].astype(jnp.float32), mask.astype(jnp.float32)) > 0
    above = positions[:, None, :] < positions[:, :count, None]
    index = jnp.arange(mask.shape[2])
    return (together & above) | (index[:count, None] == index)


class _Layout(NamedTuple):
    """Where rows and slots are in each array of a user's cache; None: not there, it says which slot comes next."""

    structure: Any
    axes: tuple[tuple[int, int] | None, ...]

    def taken(self, cache: PyTree) -> tuple[Array, ...]:
        """The arrays that have slots, as [B, S, ...]."""
        leaves = self.structure.flatten_up_to(cache)
        return tuple(
            jnp.moveaxis(x, axes, (0, 1)) for x, axes in zip(leaves, self.axes, strict=True) if axes is not None
        )

    def filled(self, like: PyTree, held: list[Array], following: int) -> PyTree:
        """A cache of these arrays, whose next slot is `following`."""
        arrays = iter(held)

        def one(x: Array, axes: tuple[int, int] | None) -> Array:
            return jnp.full_like(x, following) if axes is None else jnp.moveaxis(next(arrays), (0, 1), axes)

        leaves = self.structure.flatten_up_to(like)
        return self.structure.unflatten([one(x, axes) for x, axes in zip(leaves, self.axes, strict=True)])


def _layout(make_cache: Callable[[int, int], PyTree], name: str) -> _Layout:
    """Raises: UsageError for a cache that is none of slots."""
    (small, wide) = (jax.eval_shape(lambda size=size: make_cache(*size)) for size in SIZES)
    (rows, slots), (more_rows, more_slots) = SIZES
    found: list[tuple[int, int] | None] = []
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(small), jax.tree.leaves(wide), strict=True):
        place = jax.tree_util.keystr(path)
        grown = [axis for axis, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b]
        by_rows = [axis for axis in grown if (x.shape[axis], y.shape[axis]) == (rows, more_rows)]
        by_slots = [axis for axis in grown if x.shape[axis] >= slots and y.shape[axis] >= more_slots]
        if by_rows and by_slots:
            found.append((by_rows[0], by_slots[0]))
        elif not by_slots and jnp.issubdtype(x.dtype, jnp.integer):
            found.append(None)
        else:
            raise UsageError(
                f"the cache of {name} has {x.dtype}{list(x.shape)} at {place} for {rows} rows of {slots} slots; its "
                "arrays need an axis of rows and one of slots, or are integers that say which slot comes next"
            )
    if not any(found):
        raise UsageError(f"the cache of {name} has no arrays with slots; leave it out")
    return _Layout(jax.tree.structure(small), tuple(found))
