"""Tree attention over a prefix that is sharded by slots: devices attend to their parts and combine the results.

This is flash-decoding (Dao et al. 2023), with the split over devices. The softmax's sum of each part is kept, so the
average of the parts' outputs equals that of one softmax. The devices exchange one output per new token and head.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.pallas_kernels.tree_attention.reference import with_sinks


def shard_over_slots(attend: Callable, axes: tuple[str, ...], num_slots: Callable = lambda x: x.shape[-2]) -> Callable:
    """Return `tree_attention` for use inside `shard_map`, with the prefix sharded by slots.

    Device i along `axes` stores the i-th part of the slots. All other arguments are replicated. The new tokens count
    once, on the first device.

    num_slots: a function that returns the number of used slots of a part [..., S, h] of the keys. Later slots are
      not read.
    """

    def run(q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions, layer, window, sinks=None):
        slots = num_slots(prefix_k)
        part = jax.lax.axis_index(axes)
        first = part * slots  # positions are only compared from here on, so they may be relative to it
        out, total = attend(
            q, k, v, prefix_k, prefix_v, jnp.clip(length - first, 0, slots), positions - first, mask & (part == 0),
            key_positions=key_positions - first, layer=layer, window=window, with_total=True,
        )  # fmt: skip
        top = jax.lax.pmax(jax.lax.stop_gradient(total), axes)  # cancels in the quotient and needs no derivative
        weight = jnp.exp(total - top)[..., None]  # [B, T, H, 1]; 0 where a part has no visible keys
        weights = jax.lax.psum(weight, axes)
        out = jax.lax.psum(out * weight, axes) / weights
        if sinks is not None:  # they count once, after the parts are combined
            out, _ = with_sinks(out, top + jnp.log(weights[..., 0]), sinks)
        return out.astype(q.dtype)

    return run
