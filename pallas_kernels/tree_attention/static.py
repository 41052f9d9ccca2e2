"""Tree attention whose loops have a fixed length, for GPUs: over all slots at once, or in a fixed number of blocks.

A loop whose trip count depends on data costs a GPU a host round trip per turn. SmolLM2 with one such loop per layer
takes 1.38 ms per token on an H200, and 0.88 ms without it. The price is that slots beyond a row's length are read and
masked. A buffer is at most twice as long as its text, so they are at most as many as the used ones.

XLA computes the softmax in one kernel. It splits the sum over values into parts of the slots, which run in parallel, if
the heads alone do not occupy the device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.pallas_kernels.tree_attention.reference import (
    distance_scores,
    finish,
    group_queries,
    masked_scores,
    plain_products,
    select_layer,
    visible_keys,
    weighted_sum,
    with_value_size,
)
from specjax.pallas_kernels.tree_attention.xla import blocked_tree_attention

MAX_SCORES = 1 << 27
"""Largest number of scores in memory at a time: 512 MiB in float32.

Llama 3 8B has as many for a chunk of 512 tokens over 8,192 slots.
"""

SLOTS_PER_TILE = 128
"""Block sizes are multiples of this."""


@with_value_size
def static_tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, max_scores=MAX_SCORES, bias=None,
):  # fmt: skip
    """Compute `reference.tree_attention`, with operations that do not depend on the lengths.

    max_scores: from this number of scores on, the slots are read in blocks.
    """
    batch, t, heads, _ = q.shape
    slots, scores_per_slot = prefix_k.shape[-2], batch * heads * t
    if scores_per_slot * slots > max_scores:
        block = max(max_scores // scores_per_slot // SLOTS_PER_TILE, 1) * SLOTS_PER_TILE
        return blocked_tree_attention(
            q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, layer=layer, scale=scale,
            window=window, softcap=softcap, with_total=with_total, block=block, all_blocks=True, bias=bias,
        )  # fmt: skip
    prefix_k, prefix_v = select_layer(prefix_k, layer), select_layer(prefix_v, layer)
    grouped = group_queries(q, k.shape[1]) * jnp.asarray(scale, q.dtype)  # [B, K, G*T, h]

    in_prefix, mask = visible_keys(slots, length, positions, mask, key_positions, window)
    scores = [
        masked_scores(grouped, keys, visible, softcap, plain_products, distance_scores(bias, positions, keys_at))
        for keys, visible, keys_at in (
            (prefix_k, in_prefix, jnp.arange(slots)[None]),
            (k, mask, positions if key_positions is None else key_positions),
        )
    ]
    joined = jnp.concatenate(scores, -1)  # float32[B, K, G*T, S + M]
    weights = jax.nn.softmax(joined, -1)
    out = weighted_sum(weights[..., :slots], prefix_v, q.dtype) + weighted_sum(weights[..., slots:], v, q.dtype)
    total = jax.nn.logsumexp(joined, -1, keepdims=True) if with_total else jnp.zeros_like(out[..., :1])
    return finish(out, total, jnp.ones_like(total), t, q.dtype, with_total)
