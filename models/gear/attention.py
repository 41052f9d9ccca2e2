"""Attention over the cache of GEAR, by blocks, with an online softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.models.gear.codec import GearBlocks, compress, expand
from specjax.models.gear.slots import GearSlots, as_floats, tail_start
from specjax.pallas_kernels.tree_attention.reference import (
    empty_sums,
    finish,
    group_queries,
    masked_scores,
    online_softmax,
    select_layer,
    with_sinks,
)
from specjax.pallas_kernels.tree_attention.xla import BLOCK, products
from specjax.types import Array


def last_compressed(positions: Array, length: Array, block: int) -> Array:
    """Return the last block that queries at `positions` int32[B, T] read compressed. Negative: none.

    It depends on the position alone. `length` int32[B], the number of cached tokens, must not matter. Otherwise the
    distribution of a token would depend on where earlier rounds ended.
    """
    return positions // block - 2


@jax.named_scope(scopes.ATTENTION)
def gear_attention(
    q, k, v, prefix_k: GearSlots, prefix_v: GearSlots, length, positions, mask, *, key_positions=None, layer, scale,
    window=None, softcap=None, sinks=None,
):  # fmt: skip
    """Attend as `tree_attention` does, to a prefix whose older blocks are compressed.

    The new tokens that are not in the cache are in the order of the text if they span more than a block. Trees must
    therefore be less than a block deep.
    """
    assert window is None
    batch, t = q.shape[:2]
    form = prefix_k.form
    block = form.block
    grouped = group_queries(q, k.shape[1]) * jnp.asarray(scale, q.dtype)  # [B, K, G*T, h]
    # In a pass over an empty cache the length may be a constant. XLA would then evaluate the masked scores while it
    # compiles, which takes up to 20 s per layer for 1,024 tokens.
    length = jax.lax.optimization_barrier(length)
    last = last_compressed(positions, length, block)[:, :, None]
    num_full = length // block

    def add(carry, keys, values, visible):
        """Fold keys [B, K, n, h], where visible bool[B, T, n], into the sums of the softmax."""
        return online_softmax(carry, masked_scores(grouped, keys, visible, softcap, products), values, q.dtype)

    # A token attends to itself, so the maximum is finite before a block that may be fully masked.
    at = (positions if key_positions is None else key_positions)[:, None, :]
    carry = add(empty_sums(grouped), k, v, mask & (at // block > last))
    tails = [as_floats(select_layer(slots.tail, layer)) for slots in (prefix_k, prefix_v)]
    at = tail_start(length, block)[:, None, None] + jnp.arange(tails[0].shape[-2])
    carry = add(carry, tails[0], tails[1], (at < length[:, None, None]) & (at // block > last))

    count = (k.shape[2] + block - 2) // block - 1  # blocks that end in the new tokens and that a new token reads
    if count > 0:
        pairs = zip((prefix_k, prefix_v), tails, (k, v), strict=True)
        texts = [(slots, _uncompressed_text(tail, new, length, count * block, block)) for slots, tail, new in pairs]

        def add_new(carry):
            keys, values = (_round_trip(slots, text).astype(q.dtype) for slots, text in texts)
            number = num_full[:, None, None] + jnp.arange(count * block) // block
            return add(carry, keys, values, jnp.broadcast_to(number <= last, (batch, t, count * block)))

        carry = jax.lax.cond(jnp.any(last >= num_full[:, None, None]), add_new, lambda carry: carry, carry)

    per_step = min(max(BLOCK // block, 1), max(prefix_k.num_blocks, 1))  # a cache for one pass has no blocks

    def body(i, carry):
        start = jnp.minimum(i * per_step, prefix_k.num_blocks - per_step)  # the last step may overlap the previous one
        keys, values = (_expand_blocks(slots, layer, start, per_step).astype(q.dtype) for slots in (prefix_k, prefix_v))
        number = jnp.repeat(start + jnp.arange(per_step), block)
        visible = (number <= last) & (number < num_full[:, None, None]) & (number >= i * per_step)
        return add(carry, keys, values, jnp.broadcast_to(visible, (batch, t, per_step * block)))

    if prefix_k.num_blocks:
        used = jnp.minimum(jnp.max(num_full), jnp.max(last) + 1)
        carry = jax.lax.fori_loop(0, (jnp.maximum(used, 0) + per_step - 1) // per_step, body, carry)
    acc, total, top = carry
    if sinks is None:
        return finish(acc / total, top, total, t, q.dtype, False)
    out, logs = finish(acc / total, top, total, t, q.dtype, True)
    out, _ = with_sinks(out, logs, sinks)
    return out.astype(q.dtype)


def _uncompressed_text(tail: Array, new: Array, length: Array, count: int, block: int) -> Array:
    """Return `count` tokens [B, K, count, h] from the start of the row's unfinished block on.

    They are the last tokens of the tail [B, K, n, h], and then `new` [B, K, M, h].
    """
    first = jnp.minimum(length // block, 1) * block

    def of_row(tail, new, first, length):
        joined = jnp.concatenate([tail, jnp.zeros_like(new)], 1)
        joined = jax.lax.dynamic_update_slice_in_dim(joined, new.astype(tail.dtype), first + length % block, 1)
        return jax.lax.dynamic_slice_in_dim(joined, first, count, 1)

    return jax.vmap(of_row)(tail, new, first, length)


def _round_trip(slots: GearSlots, text: Array) -> Array:
    """Return text [B, K, blocks * block, h] as its compressed blocks represent it."""
    blocks = text.reshape(*text.shape[:2], -1, slots.form.block, text.shape[-1])
    return expand(compress(blocks, slots.form, slots.over_tokens), slots.form, slots.over_tokens).reshape(text.shape)


def _expand_blocks(slots: GearSlots, layer, start, count: int) -> Array:
    """Return `count` blocks of a layer from block `start` on, as tokens float32[B, K, count * block, h]."""

    def cut(x: Array) -> Array:
        first = [layer, 0, 0, start, *[0] * (x.ndim - 4)]
        return jax.lax.dynamic_slice(x, first, (1, *x.shape[1:3], count, *x.shape[4:]))[0]

    blocks = GearBlocks(*map(cut, slots.blocks))
    x = expand(blocks, slots.form, slots.over_tokens)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
