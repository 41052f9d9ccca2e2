"""Tree attention for any backend, in plain jnp: block by block of the prefix, as far as the longest row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.pallas_kernels.tree_attention.reference import (
    NEG,
    finish,
    group_queries,
    masked_scores,
    plain_products,
    weighted,
)

BLOCK = 256
"""Slots that one turn of the loop reads. SmolLM2 on two cores, one token, ms per layer for 480 slots of 512 / of 8,192:
all in one product 0.07 / 0.56 in float32, 0.07 / 0.86 in bfloat16; in blocks of 128 0.10 / 0.11 and 0.09 / 0.12, of 256
0.08 / 0.09 and 0.07 / 0.08."""
BLOCK_ON_GPU = 2048  # there every turn of a loop whose length is data asks the host; not measured


def blocked_tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, block=BLOCK,
):  # fmt: skip
    """As `reference.tree_attention`; work and temporaries grow with the longest row, not with the capacity.

    The new tokens first, then blocks of slots in their order, each at a multiple of `block`: what a row sums, and in
    which order, depends neither on the capacity nor on how long other rows are, since a block of which it sees nothing
    changes no bit; within a block the backend sums as it likes for this number of rows and tokens. (In a cache that is
    no multiple of `block` the last block begins earlier.)
    """
    batch, t = q.shape[:2]
    slots = prefix_k.shape[-2]
    block = min(block, slots)
    grouped = group_queries(q, k.shape[1]) * jnp.asarray(scale, q.dtype)  # [B, K, G*T, h]

    def add(carry, keys, values, visible):
        """Online softmax: fold keys [B, K, n, h] seen where visible bool[B, T, n] into (sum, total, top)."""
        acc, total, top = carry
        s = masked_scores(grouped, keys, visible, softcap, products)
        higher = jnp.maximum(top, jnp.max(s, -1, keepdims=True))
        weights, fade = jnp.exp(s - higher), jnp.exp(top - higher)
        return (
            acc * fade + weighted(weights, values, q.dtype),
            total * fade + jnp.sum(weights, -1, keepdims=True),
            higher,
        )

    def near(key_positions):
        if window is None:
            return True
        return key_positions > positions[:, :, None] - window

    def body(i, carry):
        start = jnp.minimum(i * block, slots - block)  # the last block may overlap the one before
        # The barrier ties the cache to this turn. XLA on CPU cuts bfloat16 as float32, and would convert all slots
        # ahead of the loop, unless they are kept as bits.
        held, start = jax.lax.optimization_barrier(((prefix_k, prefix_v), start))
        keys, values = jax.tree.map(lambda x: cut_slots(x, layer, start, block), held)
        slot = start + jnp.arange(block)
        visible = (slot < length[:, None, None]) & (slot >= i * block) & near(slot)
        return add(carry, keys, values, jnp.broadcast_to(visible, (batch, t, block)))

    shape = (*grouped.shape[:3], 1)
    carry = jnp.zeros(grouped.shape, jnp.float32), jnp.zeros(shape), jnp.full(shape, NEG)
    # New tokens first: each sees itself, so the maximum is real before a block may be all invisible.
    carry = add(carry, k, v, mask & near((positions if key_positions is None else key_positions)[:, None, :]))
    first = 0 if window is None else jnp.maximum(jnp.min(positions) - window + 1, 0) // block
    acc, total, top = jax.lax.fori_loop(first, (jnp.max(length) + block - 1) // block, body, carry)
    return finish(acc / total, top, total, t, q.dtype, with_total)


def cut_slots(x, layer, start, count: int):
    """`count` slots of x [B, K, S, ...], or of one layer of [layers, B, K, S, ...]."""
    if layer is None:
        return jax.lax.dynamic_slice_in_dim(x, start, count, 2)
    first = [layer, 0, 0, start, *[0] * (x.ndim - 4)]
    return jax.lax.dynamic_slice(x, first, (1, *x.shape[1:3], count, *x.shape[4:]))[0]


def products(q, keys):
    """As `plain_products`. XLA's CPU kernels pack the right operand anew each time, so there that is the shorter one.

    SmolLM2 at 1,000 slots, 1 / 4 / 16 new tokens, two cores: 35.9 / 49.9 / 76.9 ms a pass with the keys on the right,
    33.6 / 46.8 / 73.7 with the queries.
    """
    by_keys = lambda q, keys: plain_products(keys, q).swapaxes(2, 3)
    return jax.lax.platform_dependent(q, keys, cpu=by_keys, default=plain_products)
