"""Tree attention over a prefix whose slots lie on several devices: each attends to its part, then they share.

Flash-decoding (Dao et al. 2023), the split being over devices: of each part the softmax's sum is kept, so the parts'
outputs are averaged exactly as one softmax would have. What travels is one output per new token and head.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def over_slots(attend: Callable, axes: tuple[str, ...], held: Callable = lambda x: x.shape[-2]) -> Callable:
    """`tree_attention` inside of `shard_map`, where device i along `axes` holds the i-th part of the prefix's slots.

    All other arguments are whole on every device. The new tokens count once, on the first.

    held: how many slots count of a part [..., S, h] of the keys; what lies behind is not read.
    """

    def run(q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions, layer, window):
        slots = held(prefix_k)
        part = jax.lax.axis_index(axes)
        first = part * slots  # what follows only compares positions, so it may count from there
        out, total = attend(
            q, k, v, prefix_k, prefix_v, jnp.clip(length - first, 0, slots), positions - first, mask & (part == 0),
            key_positions=key_positions - first, layer=layer, window=window, with_total=True,
        )  # fmt: skip
        top = jax.lax.pmax(jax.lax.stop_gradient(total), axes)  # cancels in the quotient, and has no derivative
        weight = jnp.exp(total - top)[..., None]  # [B, T, H, 1]; 0 where a part sees nothing
        return (jax.lax.psum(out * weight, axes) / jax.lax.psum(weight, axes)).astype(q.dtype)

    return run
