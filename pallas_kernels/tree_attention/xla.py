"""Tree attention for any backend, in plain jnp: the specification for few new tokens, blocks of the prefix for many."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.pallas_kernels.tree_attention.reference import (
    NEG,
    finish,
    group_queries,
    masked_scores,
    of_layer,
    plain_products,
    tree_attention,
    weighted,
)

BLOCK = 256
MANY = 64
"""From this many new tokens on (prefill chunks) the prefix is read in blocks, only as far as the longest row: SmolLM2
reads 1,024 tokens into a buffer of 1,624 in 2.4 s otherwise. Below it, one pass over all slots has fewer operations."""


def blocked_tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, block=BLOCK, many=MANY,
):  # fmt: skip
    """As `reference.tree_attention`; work and temporaries grow with the longest row, not with the capacity."""
    batch, t = q.shape[:2]
    prefix_k, prefix_v = of_layer(prefix_k, layer), of_layer(prefix_v, layer)
    slots = prefix_k.shape[2]
    if t < many or slots <= block:
        return tree_attention(
            q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, scale=scale,
            window=window, softcap=softcap, with_total=with_total, products=products,
        )  # fmt: skip
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
        slot = start + jnp.arange(block)
        visible = (slot < length[:, None, None]) & (slot >= i * block) & near(slot)
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, block, 2)
        keys, values = jax.tree.map(cut, (prefix_k, prefix_v))
        return add(carry, keys, values, jnp.broadcast_to(visible, (batch, t, block)))

    shape = (*grouped.shape[:3], 1)
    start = jnp.zeros(grouped.shape, jnp.float32), jnp.zeros(shape), jnp.full(shape, NEG)
    # New tokens first: each sees itself, so the maximum is real before a block may be all invisible.
    carry = add(start, k, v, mask & near((positions if key_positions is None else key_positions)[:, None, :]))
    blocks = (jnp.max(length) + block - 1) // block
    acc, total, top = jax.lax.fori_loop(0, blocks, body, carry)
    return finish(acc / total, top, total, t, q.dtype, with_total)


def products(q, keys):
    """As `plain_products`. XLA's CPU kernels pack the right operand anew each time, so there that is the shorter one.

    SmolLM2 at 1,000 slots, 1 / 4 / 16 new tokens, two cores: 35.9 / 49.9 / 76.9 ms a pass with the keys on the right,
    33.6 / 46.8 / 73.7 with the queries.
    """
    by_keys = lambda q, keys: plain_products(keys, q).swapaxes(2, 3)
    return jax.lax.platform_dependent(q, keys, cpu=by_keys, default=plain_products)
