"""Caches of a user's own model: the text itself, or the slots of the model's own cache.

Both are fields of a `Model`, built from `call(params, tokens, positions=, mask=, cache=) -> (logits, cache)`.
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

PROBE_SIZES = (2, 128), (3, 256)
"""Rows and slots of two caches that are compared to find the axes of both. Slots are whole tiles, because some models
round them up.
"""


class TextCache(NamedTuple):
    """The first `length[b]` tokens of row b. Later entries are never read."""

    tokens: Array  # int32[B, S]
    length: Array  # int32[B]


class PendingTokens(NamedTuple):
    """T new tokens."""

    tokens: Array  # int32[B, T]
    positions: Array  # int32[B, T]


class SlotCache(NamedTuple):
    """The arrays of a user's cache, [B, S, ...] each, with the first `length[b]` tokens of row b."""

    arrays: tuple[Array, ...]
    length: Array  # int32[B]


def text_cache_fields(call: Callable[..., Any], name: str, max_positions: int, trees: bool) -> dict[str, Any]:
    """Return the cache fields of a model that reads its whole text in every pass."""

    def init_cache(params, inputs, batch, capacity):
        check_no_inputs(name, inputs)
        return TextCache(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def forward(params, tokens, cache, *, positions, mask, earlier=None):
        new = PendingTokens(tokens, positions)
        pending = new if earlier is None else jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), earlier, new)
        make_inputs = _tree_inputs if trees else _chain_inputs
        text, positions, visible, indices = make_inputs(cache, pending, mask, max_positions)
        logits, _ = call(params, text, positions=positions, mask=visible, cache=None)
        return _output(take_along(logits, indices[:, :, None], 1)), new

    def commit(cache, pending, path, num_nodes):
        tokens = _append(cache.tokens, pending.tokens, cache.length, path, num_nodes)
        return TextCache(tokens, cache.length + num_nodes)

    return {
        "init_cache": init_cache,
        "forward": forward,
        "commit": commit,
        "rewind": rewind,
        "capabilities": _capabilities(trees),
    }


def slot_cache_fields(
    call: Callable[..., Any], name: str, max_positions: int, trees: bool, make_cache: Callable[[int, int], PyTree]
) -> dict[str, Any]:
    """Return the cache fields of a model with its own cache, which all rows fill from the same slot on.

    In specjax each row has its own length. So every pass gets a longer cache, with the committed tokens, the pending
    ones and slots for the new ones, and a mask. The entries that it writes into the last slots become pending. This
    copies the cache once per pass.
    """
    layout = _find_slot_layout(make_cache, name)

    def init_cache(params, inputs, batch, capacity):
        check_no_inputs(name, inputs)
        return SlotCache(layout.to_slots(make_cache(batch, capacity)), jnp.zeros((batch,), jnp.int32))

    def forward(params, tokens, cache, *, positions, mask, earlier=None):
        batch, count = tokens.shape
        room = [x[:, :count] for x in layout.to_slots(make_cache(batch, count))]
        arrays = [cache.arrays, room] if earlier is None else [cache.arrays, earlier, room]
        all_slots = [jnp.concatenate(same, 1) for same in zip(*arrays, strict=True)]
        slots = all_slots[0].shape[1]
        committed = jnp.arange(cache.arrays[0].shape[1]) < cache.length[:, None]  # bool[B, S]
        visible = jnp.concatenate([jnp.broadcast_to(committed[:, None], (batch, count, committed.shape[1])), mask], 2)
        full_cache = layout.from_slots(make_cache(batch, count), all_slots, slots - count)
        positions = _clip_positions(positions, max_positions)
        logits, new_cache = call(params, tokens, positions=positions, mask=visible, cache=full_cache)
        if jax.tree.structure(new_cache) != layout.structure:
            raise UsageError(
                f"{name} must return the cache with the logits, with the same structure as its input cache"
            )
        return _output(logits), tuple(x[:, slots - count :] for x in layout.to_slots(new_cache))

    def commit(cache, pending, path, num_nodes):
        write = lambda x, new: _append(x, new, cache.length, path, num_nodes)
        return SlotCache(tuple(map(write, cache.arrays, pending)), cache.length + num_nodes)

    return {
        "init_cache": init_cache,
        "forward": forward,
        "commit": commit,
        "rewind": rewind,
        "capabilities": _capabilities(trees),
    }


def rewind(cache: TextCache | SlotCache, length: Array) -> TextCache | SlotCache:
    """Forget all but the first `length[b]` tokens of row b."""
    return cache._replace(length=jnp.minimum(cache.length, length))


def _capabilities(trees: bool) -> Capabilities:
    return Capabilities(trees=trees)


def _output(logits: Array) -> Output:
    """Return an output without hidden states, which the model does not return."""
    return Output(logits, jnp.zeros((*logits.shape[:2], 1)))


def _clip_positions(positions: Array, max_positions: int) -> Array:
    """Clip positions to the model's limit.

    Positions of padding may exceed it. `nnx.Embed` turns those into NaN, which no mask hides.
    """
    return jnp.minimum(positions, max_positions - 1)


def _append(cached: Array, new: Array, length: Array, path: Array, num_nodes: Array) -> Array:
    """Write nodes `path[b, :num_nodes[b]]` of `new` [B, T, ...] into `cached` [B, S, ...] from `length[b]` on."""
    index = jnp.arange(path.shape[1])
    selected = take_along(new, jnp.maximum(path, 0).reshape(*path.shape, *[1] * (new.ndim - 2)), 1)
    slot = jnp.where(index < num_nodes[:, None], length[:, None] + index, cached.shape[1])
    return cached.at[jnp.arange(len(path))[:, None], slot].set(selected.astype(cached.dtype), mode="drop")


def _chain_inputs(cache: TextCache, pending: PendingTokens, mask: Array, max_positions: int):
    """Build the text [B, L] that ends with the deepest new token and its ancestors. mask: bool[B, T, P + T].

    Returns: text, positions, mask, and the index [B, T] of each new token in the text.
    """
    batch, size = cache.tokens.shape
    depth = jnp.sum(mask, 2, dtype=jnp.int32)  # int32[B, T], 1 for a token that directly follows the committed text
    on_chain = take_along(mask, jnp.argmax(depth, 1)[:, None, None], 1)[:, 0]  # bool[B, P + T]
    width = min(size + on_chain.shape[1], max_positions)
    slots = cache.length[:, None] + jnp.cumsum(on_chain, 1) - 1
    text = jnp.pad(cache.tokens, ((0, 0), (0, on_chain.shape[1])))[:, :width]
    text = text.at[jnp.arange(batch)[:, None], jnp.where(on_chain, slots, width)].set(pending.tokens, mode="drop")
    positions = jnp.broadcast_to(jnp.arange(width), text.shape)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
    return text, positions, causal, jnp.minimum(cache.length[:, None] + depth - 1, width - 1)


def _tree_inputs(cache: TextCache, pending: PendingTokens, mask: Array, max_positions: int):
    """Build the text buffer followed by all pending tokens, with the mask of the tree.

    Returns: the same values as `_chain_inputs`.
    """
    batch, size = cache.tokens.shape
    count, new = pending.tokens.shape[1], mask.shape[1]
    pending_mask = jnp.concatenate([_earlier_mask(mask, pending.positions), mask], 1)  # bool[B, P + T, P + T]
    committed = jnp.broadcast_to((jnp.arange(size) < cache.length[:, None])[:, None], (batch, count, size))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size + count), bool)), (batch, size, size + count))
    visible = jnp.concatenate([causal, jnp.concatenate([committed, pending_mask], 2)], 1)
    slots = jnp.broadcast_to(jnp.arange(size), (batch, size))
    positions = _clip_positions(jnp.concatenate([slots, pending.positions], 1), max_positions)
    text = jnp.concatenate([cache.tokens, pending.tokens], 1)
    return text, positions, visible, jnp.broadcast_to(size + count - new + jnp.arange(new), (batch, new))


def _earlier_mask(mask: Array, positions: Array) -> Array:
    """Compute the mask bool[B, P, P + T] of the P tokens that were already pending.

    Each sees itself, and the tokens at smaller positions that a new token sees together with it.

    mask: bool[B, T, P + T]; positions: int32[B, P + T].
    """
    count = mask.shape[2] - mask.shape[1]
    shares_descendant = jnp.einsum("btp,bts->bps", mask[:, :, :count].astype(jnp.float32), mask.astype(jnp.float32)) > 0
    is_ancestor = positions[:, None, :] < positions[:, :count, None]
    index = jnp.arange(mask.shape[2])
    return (shares_descendant & is_ancestor) | (index[:count, None] == index)


class _SlotLayout(NamedTuple):
    """The axes of rows and slots in each array of a user's cache; None for an integer with the next slot."""

    structure: Any
    axes: tuple[tuple[int, int] | None, ...]

    def to_slots(self, cache: PyTree) -> tuple[Array, ...]:
        """Return the arrays that have slots, as [B, S, ...]."""
        leaves = self.structure.flatten_up_to(cache)
        return tuple(
            jnp.moveaxis(x, axes, (0, 1)) for x, axes in zip(leaves, self.axes, strict=True) if axes is not None
        )

    def from_slots(self, like: PyTree, slots: list[Array], next_slot: int) -> PyTree:
        """Build a cache of these arrays with the next slot `next_slot`."""
        arrays = iter(slots)

        def fill_leaf(x: Array, axes: tuple[int, int] | None) -> Array:
            return jnp.full_like(x, next_slot) if axes is None else jnp.moveaxis(next(arrays), (0, 1), axes)

        leaves = self.structure.flatten_up_to(like)
        return self.structure.unflatten([fill_leaf(x, axes) for x, axes in zip(leaves, self.axes, strict=True)])


def _find_slot_layout(make_cache: Callable[[int, int], PyTree], name: str) -> _SlotLayout:
    """Find the axes of rows and slots of a user's cache.

    Raises: UsageError for a cache that has no slots.
    """
    (small, wide) = (jax.eval_shape(lambda size=size: make_cache(*size)) for size in PROBE_SIZES)
    (rows, slots), (more_rows, more_slots) = PROBE_SIZES
    axes: list[tuple[int, int] | None] = []
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(small), jax.tree.leaves(wide), strict=True):
        place = jax.tree_util.keystr(path)
        changed_axes = [axis for axis, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b]
        by_rows = [axis for axis in changed_axes if (x.shape[axis], y.shape[axis]) == (rows, more_rows)]
        by_slots = [axis for axis in changed_axes if x.shape[axis] >= slots and y.shape[axis] >= more_slots]
        if by_rows and by_slots:
            axes.append((by_rows[0], by_slots[0]))
        elif not by_slots and jnp.issubdtype(x.dtype, jnp.integer):
            axes.append(None)
        else:
            raise UsageError(
                f"the cache of {name} has {x.dtype}{list(x.shape)} at {place} for {rows} rows of {slots} slots; each "
                "array needs an axis of rows and one of slots, or must be an integer, the next slot"
            )
    if not any(axes):
        raise UsageError(f"the cache of {name} has no arrays with slots; leave cache out")
    return _SlotLayout(jax.tree.structure(small), tuple(axes))
