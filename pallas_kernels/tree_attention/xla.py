"""Tree attention for any backend in plain jnp: it streams the prefix block by block, up to the longest row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.pallas_kernels.tree_attention.reference import (
    distance_scores,
    empty_sums,
    finish,
    group_queries,
    masked_scores,
    online_softmax,
    plain_products,
    with_value_size,
)

BLOCK = 256
"""Slots per iteration.

SmolLM2 on two cores, one token, ms per layer for 480 slots used of 512 / of 8,192: one product 0.07 / 0.56 in float32,
0.07 / 0.86 in bfloat16; blocks of 128 0.10 / 0.11 and 0.09 / 0.12, blocks of 256 0.08 / 0.09 and 0.07 / 0.08.
"""


@with_value_size
def blocked_tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, block=BLOCK, all_blocks=False, bias=None,
):  # fmt: skip
    """Compute `reference.tree_attention` with work and memory that grow with the longest row, not the capacity.

    New tokens come first, then blocks of slots in order, each at a multiple of `block`. So the sums of a row and their
    order depend neither on the capacity nor on the lengths of other rows. A block that a row does not attend to changes
    no bit. Within a block the backend chooses the order of summation for this number of rows and tokens. If the cache
    is not a multiple of `block`, the last block begins earlier.

    all_blocks: read all blocks of the cache, so that the number of iterations is known to the compiler.
    """
    batch, t = q.shape[:2]
    slots = prefix_k.shape[-2]
    block = min(block, slots)
    grouped = group_queries(q, k.shape[1]) * jnp.asarray(scale, q.dtype)  # [B, K, G*T, h]

    def add(carry, keys, values, visible, keys_at):
        """Fold keys [B, K, n, h], where visible bool[B, T, n], into the sums of the softmax."""
        scores = masked_scores(grouped, keys, visible, softcap, products, distance_scores(bias, positions, keys_at))
        return online_softmax(carry, scores, values, q.dtype)

    def in_window(key_positions):
        if window is None:
            return True
        return key_positions > positions[:, :, None] - window

    def body(i, carry):
        start = jnp.minimum(i * block, slots - block)  # the last block may overlap the previous one
        # The barrier ties the cache to this iteration. XLA on CPU slices bfloat16 as float32. Without the barrier it
        # would convert all slots before the loop, unless they are stored as bits.
        prefix, start = jax.lax.optimization_barrier(((prefix_k, prefix_v), start))
        keys, values = jax.tree.map(lambda x: cut_slots(x, layer, start, block), prefix)
        slot = start + jnp.arange(block)
        visible = (slot < length[:, None, None]) & (slot >= i * block) & in_window(slot)
        return add(carry, keys, values, jnp.broadcast_to(visible, (batch, t, block)), slot[None])

    # New tokens first: each attends to itself, so the maximum is finite before a block that may be fully masked.
    keys_at = positions if key_positions is None else key_positions
    carry = add(empty_sums(grouped), k, v, mask & in_window(keys_at[:, None, :]), keys_at)
    if all_blocks:
        first, last = 0, -(-slots // block)
    else:
        first = 0 if window is None else jnp.maximum(jnp.min(positions) - window + 1, 0) // block
        last = (jnp.max(length) + block - 1) // block
    acc, total, top = jax.lax.fori_loop(first, last, body, carry)
    return finish(acc / total, top, total, t, q.dtype, with_total)


def cut_slots(x, layer, start, count: int):
    """Return `count` slots of x [B, K, S, ...], or of one layer of [layers, B, K, S, ...]."""
    if layer is None:
        return jax.lax.dynamic_slice_in_dim(x, start, count, 2)
    first = [layer, 0, 0, start, *[0] * (x.ndim - 4)]
    return jax.lax.dynamic_slice(x, first, (1, *x.shape[1:3], count, *x.shape[4:]))[0]


def products(q, keys):
    """Multiply like `plain_products`.

    XLA's CPU kernels repack the right operand each time, so there it is the shorter one.

    SmolLM2 at 1,000 slots, 1 / 4 / 16 new tokens, two cores: 35.9 / 49.9 / 76.9 ms per pass with the keys on the right,
    33.6 / 46.8 / 73.7 with the queries.
    """
    by_keys = lambda q, keys: plain_products(keys, q).swapaxes(2, 3)
    return jax.lax.platform_dependent(q, keys, cpu=by_keys, default=plain_products)
