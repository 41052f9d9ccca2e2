"""Tree attention of several rows that share a prefix, such as several positions of one text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.numerics.quantization import Quantized
from specjax.pallas_kernels.tree_attention.reference import NEG, factors, select_layer, with_value_size


@with_value_size
def shared_tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, first=None, key_positions=None, layer=None, scale,
    window=None, softcap=None, sinks=None,
):  # fmt: skip
    """Compute `reference.tree_attention` of R rows for each of B prefixes: rows b R ... b R + R - 1 attend to prefix b.

    The prefix is neither copied nor read once per row: the queries of all R rows are rows of one matrix.

    Args:
      q [B R, T, H, h], k, v [B R, K, M, h], prefix_k, prefix_v [B, K, S, h]; length, positions and mask of B R rows.
      first: int32[B R], the first slot of the prefix that each row attends to; None: 0.

    Raises: NotImplementedError for an int8 prefix.
    """
    if isinstance(prefix_k, Quantized):
        raise NotImplementedError("rows cannot share an int8 prefix; use an unquantised cache")
    prefix_k, prefix_v = select_layer(prefix_k, layer), select_layer(prefix_v, layer)
    (num_rows, t, heads, dim), (batch, kv_heads, slots, _) = q.shape, prefix_k.shape
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, num_rows // batch, t, kv_heads, heads // kv_heads, dim)
    by_row = lambda x: x.reshape(batch, num_rows // batch, *x.shape[1:])

    slot = jnp.arange(slots)
    in_prefix = slot < length[:, None, None]  # [B R, 1, S]
    if first is not None:
        in_prefix &= slot >= first[:, None, None]
    in_prefix = jnp.broadcast_to(in_prefix, (num_rows, t, slots))
    if window is not None:
        in_prefix &= slot > positions[:, :, None] - window
        keys_at = positions if key_positions is None else key_positions
        mask = mask & (keys_at[:, None, :] > positions[:, :, None] - window)

    def scores(form, keys, visible):
        s = jnp.einsum(form, q, factors(keys, q.dtype)[0], preferred_element_type=jnp.float32)
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        return jnp.where(by_row(visible)[:, :, :, None, None], s, NEG)

    old = scores("brtkgh,bksh->brtkgs", prefix_k, in_prefix)
    new = scores("brtkgh,brkmh->brtkgm", by_row(k), mask)
    parts = [old, new]
    if sinks is not None:  # one more score per head, whose weight is dropped
        sink = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1)
        parts.append(jnp.broadcast_to(sink, (*old.shape[:-1], 1)))
    weights = jax.nn.softmax(jnp.concatenate(parts, -1), -1).astype(q.dtype)
    # Heads before queries, which is faster for bfloat16 products on CPUs: [b, k, r t g, s] and [b r, k, t g, m].
    w_old, w_new = (
        jnp.moveaxis(weights[..., :slots], 3, 1),
        jnp.moveaxis(weights[..., slots : slots + mask.shape[-1]], 3, 2),
    )
    rows = lambda x, batch: x.reshape(batch, kv_heads, -1, x.shape[-1])
    weighted = lambda w, values: jnp.einsum("bkqs,bksh->bkqh", w, values, preferred_element_type=jnp.float32)
    old = weighted(rows(w_old, batch), factors(prefix_v, q.dtype)[0]).reshape(*w_old.shape[:-1], dim)
    new = weighted(rows(w_new, num_rows), v.astype(q.dtype)).reshape(*w_new.shape[:-1], dim)
    out = jnp.moveaxis(old, 1, 3) + jnp.moveaxis(new, 2, 3)
    return out.astype(q.dtype).reshape(num_rows, t, heads, dim)
