"""Tree attention in which a token's result, to the bit, does not depend on the pass that it is in.

A key belongs to a slot, its position in the text, whether the cache has it already or it is pending in this pass. What
a token sums up goes by slots: groups of them at multiples of GROUP, one after another, and within a group in their
order. So it makes no difference how many tokens are new, which tree stands around this one, which rows there are and
how large the cache is. That holds

- within a group, since the products over its slots are of one form: all slots of the group, at least ROWS rows (XLA's
  CPU kernels compute fewer in another order; a row does not depend on the others);
- between groups, since each adds one float32 number to the sum, and since a change of the softmax's maximum, which is a
  power of two, multiplies exactly;
- of the exponentials, since they are integer arithmetic (`specjax.numerics.reproducible_math`).

The slots behind the last whole group hold other tokens for each node of a tree, so they are put together per node.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.numerics.quantization import BITS
from specjax.numerics.reproducible_math import FRACTION, fixed_point, power_of_two, sum_in_order, two_to
from specjax.pallas_kernels.tree_attention.reference import factors, finish, group_queries, of_layer
from specjax.pallas_kernels.tree_attention.xla import cut_slots, products

GROUP = 64  # slots; a multiple of what matrix units sum up at once
BLOCK = 256  # slots that one turn of the loop reads
ROWS = 4 if jax.__version_info__ < (0, 12) else 16
"""Rows of a product, at least: XLA's CPU kernels sum fewer in another order. With jax 0.10 8 took five times as long
as 4 for 8 nodes on two cores."""
AT_ONCE = 32  # nodes whose slots are put together at a time
NOTHING = -(1 << 20)  # the exponent of what is not seen
LOG_2 = 0.6931471805599453


class Sums(NamedTuple):
    """Of the softmax so far, per query head and new token."""

    values: jax.Array  # float32[B, K, G, T, h], weighted
    weights: jax.Array  # float32[B, K, G, T]
    top: jax.Array  # int32[B, K, G, T], the exponent to which both are relative


def tree_attention_by_slot(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, block=BLOCK, group=GROUP,
):  # fmt: skip
    """As `reference.tree_attention`, for bfloat16. The new tokens that one sees lie at positions of their own, from
    `length` on, less than M of them; others are not seen.

    block: a multiple of `group`, as the number of slots is.
    """
    batch, t, heads, dim = q.shape
    kv_heads, slots, new = k.shape[1], prefix_k.shape[-2], k.shape[2]
    block, group = min(block, slots), min(group, slots)
    near = positions if key_positions is None else key_positions
    grouped = group_queries(q, kv_heads) * jnp.asarray(scale, q.dtype)  # [B, K, G * T, h]
    rows = grouped.shape[2]

    def scores(keys) -> jax.Array:
        """int32[B, K, G, T, n] of keys [B, K, n, h]."""
        keys, scales = factors(keys, q.dtype)
        both = jax.lax.optimization_barrier((_at_least(grouped), _at_least(keys)))
        s = products(*both)[:, :, :rows, : keys.shape[2]]
        s = s if scales is None else s * scales
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        return fixed_point(s).reshape(batch, kv_heads, heads // kv_heads, t, -1)

    def seen_at(slot, visible):
        """`visible`, of these slots [.., n] those within the window of each token: bool[B, T, n]."""
        visible = visible if window is None else visible & (slot > positions[:, :, None] - window)
        return jnp.broadcast_to(visible, (batch, t, visible.shape[-1]))

    # Whole groups that the cache holds: all new tokens see the same.
    held = length // group * group  # int32[B]

    def body(i, sums: Sums) -> Sums:
        start = jnp.minimum(i * block, slots - block)
        (keys, values), start = jax.lax.optimization_barrier(((prefix_k, prefix_v), start))
        keys, values = jax.tree.map(lambda x: cut_slots(x, layer, start, block), (keys, values))
        slot = start + jnp.arange(block)
        seen = seen_at(slot, (slot < held[:, None, None]) & (slot >= i * block))
        values, scales = factors(jax.tree.map(lambda x: x[:, :, None], values), q.dtype)
        return _add(sums, scores(keys), seen, values, scales, group)

    shape = batch, kv_heads, heads // kv_heads, t
    sums = Sums(jnp.zeros((*shape, dim)), jnp.zeros(shape), jnp.full(shape, NOTHING))
    first = 0 if window is None else jnp.maximum(jnp.min(positions) - window + 1, 0) // block
    sums = jax.lax.fori_loop(first, (jnp.max(held) + block - 1) // block, body, sums)

    # Behind them: what the cache holds of one group, and the new tokens, each to be put at its slot.
    begin = jnp.minimum(held, slots - group)
    rest = jax.tree.map(lambda x: _cut_each(x, begin, group), (of_layer(prefix_k, layer), of_layer(prefix_v, layer)))
    keys, values = jax.tree.map(_join, rest, (k, v))
    index = begin[:, None] + jnp.arange(group)
    visible = jnp.broadcast_to((index < length[:, None])[:, None], (batch, t, group))
    slot = jnp.concatenate([index, near], 1)  # int32[B, group + M]
    seen = seen_at(slot[:, None], jnp.concatenate([visible, mask], 2))
    place = held[:, None] + jnp.arange(-(-(group - 1 + new) // group) * group)  # int32[B, n], the slots to be filled
    behind = scores(keys)  # int32[B, K, G, T, group + M]

    def add_behind(sums: Sums, behind, seen, known) -> Sums:
        """known: bool[B, W, group + M], what lies at the slots; W = 1: the same for all tokens."""
        found = known[:, :, None] & (slot[:, None, None] == place[:, None, :, None])  # bool[B, W, n, group + M]
        which, there = jnp.argmax(found, -1), jnp.any(found, -1)  # [B, W, n]
        pick = lambda x: take_along(x, jnp.broadcast_to(which[:, None, None], (*x.shape[:-1], which.shape[-1])), -1)
        put = lambda x: take_along(x[:, :, None], which.reshape(batch, 1, *which.shape[1:], *[1] * (x.ndim - 3)), 3)
        values_there, scales = factors(jax.tree.map(put, values), q.dtype)  # [B, K, W, n, h]
        at = jnp.broadcast_to(which, (batch, seen.shape[1], which.shape[-1]))
        return _add(sums, pick(behind), take_along(seen, at, -1) & there, values_there, scales, group)

    if t <= AT_ONCE:
        sums = add_behind(sums, behind, seen, seen)
    else:
        one_path = jnp.all(near == near[:, :1] + jnp.arange(new))
        alike = lambda: add_behind(sums, behind, seen, jnp.any(seen, 1, keepdims=True))
        sums = jax.lax.cond(one_path, alike, lambda: _in_parts(add_behind, sums, behind, seen))
    flat = lambda x: x.reshape(batch, kv_heads, rows, -1)
    total = flat(jnp.where(sums.weights > 0, sums.weights, 1.0))  # 0: sees nothing
    return finish(flat(sums.values) / total, flat(sums.top) * LOG_2, total, t, q.dtype, with_total)


def _add(sums: Sums, scores, seen, values, scales, group: int) -> Sums:
    """`sums` with what tokens see at n slots: scores int32[B, K, G, T, n], seen bool[B, T, n], values [B, K, W, n, h],
    of which each token has its own (W = T) or all have the same (W = 1), and their scales [B, K, W, 1, n] or None.
    """
    seen = seen[:, None, None]
    top = jnp.maximum(sums.top, jnp.max(jnp.where(seen, scores >> FRACTION, NOTHING), -1))
    weights = jnp.where(seen, power_of_two(scores, top[..., None]), 0.0)  # float32[B, K, G, T, n]
    own = values.shape[2] > 1
    # The rows that share their values, in one product: [B, K, W, rows, n].
    by_values = weights.swapaxes(2, 3) if own else weights.reshape(*weights.shape[:2], 1, -1, weights.shape[-1])
    scaled = (by_values if scales is None else by_values * scales).astype(values.dtype)
    in_groups = lambda x, axis: x.reshape(*x.shape[:axis], -1, group, *x.shape[axis + 1 :])
    left = _at_least(in_groups(scaled, 4).swapaxes(3, 4))  # [B, K, W, n / group, rows, group]
    right = in_groups(values, 3)  # [B, K, W, n / group, group, h]
    # As they lie here: a transposition taken into the product would have another kernel sum it.
    left, right = jax.lax.optimization_barrier((left, right))
    batched = (0, 1, 2, 3), (0, 1, 2, 3)
    parts = jax.lax.dot_general(left, right, (((5,), (4,)), batched), preferred_element_type=jnp.float32)
    parts = parts[..., : by_values.shape[3], :]  # float32[B, K, W, n / group, rows, h]
    parts = parts.transpose(
        3, 0, 1, 4, 2, 5
    )  # [n / group, B, K, rows, W, h]: these last, G * T, in the order of `sums`
    totals = sum_in_order(in_groups(weights, 4))  # float32[B, K, G, T, n / group]
    fade = two_to(sums.top - top)
    value_sum, weight_sum = sums.values * fade[..., None], sums.weights * fade
    for i, part in enumerate(parts):
        value_sum += part.reshape(value_sum.shape)
        weight_sum += totals[..., i]
    return Sums(value_sum, weight_sum, top)


def _in_parts(add_behind, sums: Sums, behind, seen) -> Sums:
    """`add_behind` for AT_ONCE tokens after one another: what is put together for all does not fit."""
    t = seen.shape[1]
    count = -(-t // AT_ONCE)

    def split(x, axis):
        x = jnp.pad(x, [(0, count * AT_ONCE - t if n == axis else 0) for n in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, AT_ONCE, *x.shape[axis + 1 :]), axis, 0)

    def one(xs):
        sums, behind, seen = xs
        return add_behind(sums, behind, seen, seen)

    parts = jax.lax.map(one, (jax.tree.map(lambda x: split(x, 3), sums), split(behind, 3), split(seen, 1)))
    join = lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:])[:, :, :, :t]
    return jax.tree.map(join, parts)


def _at_least(x):
    """x [..., n, h] with zeros up to ROWS rows."""
    missing = max(0, ROWS - x.shape[-2])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])


def _cut_each(x, begin, count: int):
    """`count` slots of x [B, K, S, ...], in each row from its own `begin` int32[B]."""
    return jax.vmap(lambda x, begin: jax.lax.dynamic_slice_in_dim(x, begin, count, 1))(x, begin)


def _join(old, new):
    """Keys or values of the cache and then the new ones, both as bits where the cache keeps these."""
    new = jax.lax.bitcast_convert_type(new, BITS) if old.dtype == BITS else new
    return jnp.concatenate([old, new], 2)
