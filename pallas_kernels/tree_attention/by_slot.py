"""Tree attention in which no bit of a token's result depends on the pass that computes it.

A key belongs to a slot, its position in the text, whether it is already cached or pending in this pass. A token's sums
are ordered by slots: groups of slots at multiples of GROUP, one after another, and within a group in order. So the
result does not depend on the number of new tokens, the tree around a token, the other rows, or the cache size. It is
exact

- within a group, since the products over its slots have one form: all slots of the group, and at least ROWS rows (XLA's
  CPU kernels sum fewer rows in another order; rows do not depend on each other);
- between groups, since each adds one float32 number to the sum, and a change of the softmax's maximum, a power of two,
  multiplies exactly;
- for the exponentials, since they are integer arithmetic (`specjax.numerics.reproducible_math`).

The slots after the last full group contain different tokens for each node of a tree, so they are gathered per node.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.numerics.quantization import BITS
from specjax.numerics.reproducible_math import FRACTION, fixed_point, power_of_two, sum_in_order, two_to
from specjax.pallas_kernels.tree_attention.reference import (
    factors,
    finish,
    group_queries,
    plain_products,
    select_layer,
    with_value_size,
)
from specjax.pallas_kernels.tree_attention.xla import cut_slots

GROUP = 64  # slots; a multiple of the length that matrix units sum at once
BLOCK, BLOCK_OF_ONE = 256, 128
"""Slots per iteration, in passes over several tokens and over one.

For int8 SmolLM2 and 1,024 cached tokens on two cores with AMX, blocks of 256 and 128 add 7.1 and 4.8 ms to a pass over
one token, and 21.9 and 24.6 ms to one over eight.
"""
ROWS = 4 if jax.__version_info__ < (0, 12) else 16
"""Minimum rows of a product, since XLA's CPU kernels sum fewer rows in another order.

With jax 0.10, 8 took five times as long as 4 for 8 nodes on two cores.
"""
AT_ONCE = 32  # nodes whose slots are gathered at once
NO_EXPONENT = -(1 << 20)  # of masked keys
LOG_2 = 0.6931471805599453


class Sums(NamedTuple):
    """Partial sums of the softmax, per query head and new token."""

    values: jax.Array  # float32[B, K, G, T, h], weighted
    weights: jax.Array  # float32[B, K, G, T]
    top: jax.Array  # int32[B, K, G, T], exponent to which both are relative


@with_value_size
def tree_attention_by_slot(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, block=None, group=GROUP,
):  # fmt: skip
    """Compute `reference.tree_attention` for bfloat16.

    The new tokens that a token attends to have distinct positions from `length` on, below `length` + M. Others are
    ignored.

    block: slots per iteration; None: BLOCK, or BLOCK_OF_ONE for one token. It changes no bit. It and the number of
      slots are multiples of `group`.
    """
    batch, t, heads, dim = q.shape
    kv_heads, slots, new = k.shape[1], prefix_k.shape[-2], k.shape[2]
    block = (BLOCK if t > 1 else BLOCK_OF_ONE) if block is None else block
    block, group = min(block, slots), min(group, slots)
    keys_at = positions if key_positions is None else key_positions
    grouped = group_queries(q, kv_heads) * jnp.asarray(scale, q.dtype)  # [B, K, G * T, h]
    rows = grouped.shape[2]

    def scores(keys) -> jax.Array:
        """Return int32[B, K, G, T, n], the scores of keys [B, K, n, h]."""
        keys, scales = factors(keys, q.dtype)
        both = jax.lax.optimization_barrier((_pad_rows(grouped), _pad_rows(keys)))
        s = _score_products(*both)[:, :, :rows, : keys.shape[2]]
        s = s if scales is None else s * scales
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        return fixed_point(s).reshape(batch, kv_heads, heads // kv_heads, t, -1)

    def within_window(slot, visible):
        """Return bool[B, T, n]: the `visible` ones of slots [.., n] that lie within the window of each token."""
        visible = visible if window is None else visible & (slot > positions[:, :, None] - window)
        return jnp.broadcast_to(visible, (batch, t, visible.shape[-1]))

    # Full groups in the cache: all new tokens attend to the same ones.
    full_slots = length // group * group  # int32[B]

    def body(i, sums: Sums) -> Sums:
        start = jnp.minimum(i * block, slots - block)
        (keys, values), start = jax.lax.optimization_barrier(((prefix_k, prefix_v), start))
        keys, values = jax.tree.map(lambda x: cut_slots(x, layer, start, block), (keys, values))
        slot = start + jnp.arange(block)
        in_window = within_window(slot, (slot < full_slots[:, None, None]) & (slot >= i * block))
        values, scales = factors(jax.tree.map(lambda x: x[:, :, None], values), q.dtype)
        return _add_keys(sums, scores(keys), in_window, values, scales, group)

    shape = batch, kv_heads, heads // kv_heads, t
    sums = Sums(jnp.zeros((*shape, dim)), jnp.zeros(shape), jnp.full(shape, NO_EXPONENT))
    first = 0 if window is None else jnp.maximum(jnp.min(positions) - window + 1, 0) // block
    sums = jax.lax.fori_loop(first, (jnp.max(full_slots) + block - 1) // block, body, sums)

    # After them: the cached slots of one partial group, and the new tokens, each moved to its slot.
    begin = jnp.minimum(full_slots, slots - group)
    partial = jax.tree.map(
        lambda x: _slice_rows(x, begin, group), (select_layer(prefix_k, layer), select_layer(prefix_v, layer))
    )
    keys, values = jax.tree.map(_join, partial, (k, v))
    index = begin[:, None] + jnp.arange(group)
    visible = jnp.broadcast_to((index < length[:, None])[:, None], (batch, t, group))
    slot = jnp.concatenate([index, keys_at], 1)  # int32[B, group + M]
    attends = within_window(slot[:, None], jnp.concatenate([visible, mask], 2))
    place = full_slots[:, None] + jnp.arange(-(-(group - 1 + new) // group) * group)  # int32[B, n], slots to fill
    tail_scores = scores(keys)  # int32[B, K, G, T, group + M]

    def add_tail(sums: Sums, tail_scores, attends, present) -> Sums:
        """Add the tail. present: bool[B, W, group + M], keys at the slots; W = 1: the same for all tokens."""
        is_source = present[:, :, None] & (slot[:, None, None] == place[:, None, :, None])  # bool[B, W, n, group + M]
        source, is_filled = jnp.argmax(is_source, -1), jnp.any(is_source, -1)  # [B, W, n]
        pick = lambda x: take_along(x, jnp.broadcast_to(source[:, None, None], (*x.shape[:-1], source.shape[-1])), -1)
        put = lambda x: take_along(x[:, :, None], source.reshape(batch, 1, *source.shape[1:], *[1] * (x.ndim - 3)), 3)
        values_at, scales = factors(jax.tree.map(put, values), q.dtype)  # [B, K, W, n, h]
        source_of_token = jnp.broadcast_to(source, (batch, attends.shape[1], source.shape[-1]))
        return _add_keys(
            sums, pick(tail_scores), take_along(attends, source_of_token, -1) & is_filled, values_at, scales, group
        )

    if t <= AT_ONCE:
        sums = add_tail(sums, tail_scores, attends, attends)
    else:
        one_path = jnp.all(keys_at == keys_at[:, :1] + jnp.arange(new))
        share_path = lambda: add_tail(sums, tail_scores, attends, jnp.any(attends, 1, keepdims=True))
        sums = jax.lax.cond(one_path, share_path, lambda: _in_parts(add_tail, sums, tail_scores, attends))
    flat = lambda x: x.reshape(batch, kv_heads, rows, -1)
    total = flat(jnp.where(sums.weights > 0, sums.weights, 1.0))  # 0: no visible keys
    return finish(flat(sums.values) / total, flat(sums.top) * LOG_2, total, t, q.dtype, with_total)


def _add_keys(sums: Sums, scores, visible, values, scales, group: int) -> Sums:
    """Add to `sums` the visible keys at n slots.

    Args:
      scores: int32[B, K, G, T, n]. visible: bool[B, T, n].
      values: [B, K, W, n, h], one set per token (W = T) or one for all (W = 1). scales: [B, K, W, 1, n] or None.
    """
    visible = visible[:, None, None]
    top = jnp.maximum(sums.top, jnp.max(jnp.where(visible, scores >> FRACTION, NO_EXPONENT), -1))
    weights = jnp.where(visible, power_of_two(scores, top[..., None]), 0.0)  # float32[B, K, G, T, n]
    is_per_token = values.shape[2] > 1
    # Rows that share their values are in one product: [B, K, W, rows, n].
    by_values = (
        weights.swapaxes(2, 3) if is_per_token else weights.reshape(*weights.shape[:2], 1, -1, weights.shape[-1])
    )
    scaled = (by_values if scales is None else by_values * scales).astype(values.dtype)
    in_groups = lambda x, axis: x.reshape(*x.shape[:axis], -1, group, *x.shape[axis + 1 :])
    lhs = _pad_rows(in_groups(scaled, 4).swapaxes(3, 4))  # [B, K, W, n / group, rows, group]
    rhs = in_groups(values, 3)  # [B, K, W, n / group, group, h]
    # In this layout: a transposition fused into the product would select a kernel with another order of summation.
    lhs, rhs = jax.lax.optimization_barrier((lhs, rhs))
    batched = (0, 1, 2, 3), (0, 1, 2, 3)
    parts = jax.lax.dot_general(lhs, rhs, (((5,), (4,)), batched), preferred_element_type=jnp.float32)
    parts = jax.lax.optimization_barrier(parts)[..., : by_values.shape[3], :]  # float32[B, K, W, n / group, rows, h]
    parts = parts.transpose(3, 0, 1, 4, 2, 5)  # [n / group, B, K, rows, W, h]; rows * W is G * T in the order of `sums`
    totals = sum_in_order(in_groups(weights, 4))  # float32[B, K, G, T, n / group]
    fade = two_to(sums.top - top)
    value_sum, weight_sum = sums.values * fade[..., None], sums.weights * fade
    for i, part in enumerate(parts):
        value_sum += part.reshape(value_sum.shape)
        weight_sum += totals[..., i]
    return Sums(value_sum, weight_sum, top)


def _score_products(q, keys):
    """Multiply like `xla.products`, in one form for every batch.

    The barrier keeps the result in its layout. For a batch of one, XLA would otherwise exchange the operands instead of
    transposing the result, and another kernel sums them (1 of 100 float32 numbers differed, on a CPU with AMX).
    """
    by_keys = lambda q, keys: jax.lax.optimization_barrier(plain_products(keys, q)).swapaxes(2, 3)
    return jax.lax.platform_dependent(q, keys, cpu=by_keys, default=plain_products)


def _in_parts(add_tail, sums: Sums, tail_scores, visible) -> Sums:
    """Apply `add_tail` to AT_ONCE tokens at a time, because the gathered slots of all tokens do not fit into memory."""
    t = visible.shape[1]
    count = -(-t // AT_ONCE)

    def split(x, axis):
        x = jnp.pad(x, [(0, count * AT_ONCE - t if n == axis else 0) for n in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, AT_ONCE, *x.shape[axis + 1 :]), axis, 0)

    def add_part(xs):
        sums, tail_scores, visible = xs
        return add_tail(sums, tail_scores, visible, visible)

    parts = jax.lax.map(add_part, (jax.tree.map(lambda x: split(x, 3), sums), split(tail_scores, 3), split(visible, 1)))
    join = lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:])[:, :, :, :t]
    return jax.tree.map(join, parts)


def _pad_rows(x):
    """Pad x [..., n, h] with zeros to at least ROWS rows."""
    missing = max(0, ROWS - x.shape[-2])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])


def _slice_rows(x, begin, count: int):
    """Return `count` slots of x [B, K, S, ...], in each row from `begin` int32[B] on."""
    return jax.vmap(lambda x, begin: jax.lax.dynamic_slice_in_dim(x, begin, count, 1))(x, begin)


def _join(old, new):
    """Concatenate cached and new keys or values, both as bits if the cache stores bits."""
    new = jax.lax.bitcast_convert_type(new, BITS) if old.dtype == BITS else new
    return jnp.concatenate([old, new], 2)
