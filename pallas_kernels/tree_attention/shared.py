"""Tree attention of rows that share a prefix, as many places of one text do."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.numerics.quantization import Quantized
from specjax.pallas_kernels.tree_attention.reference import NEG, factors, of_layer


def shared_tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, first=None, key_positions=None, layer=None, scale,
    window=None, softcap=None,
):  # fmt: skip
    """As `reference.tree_attention`, of R rows for each of the B of the prefix: rows b R ... b R + R - 1 see that of b.

    The prefix is neither copied nor read once for each row: the queries of all R are rows of one matrix.

    Args:
      q [B R, T, H, h], k, v [B R, K, M, h], prefix_k, prefix_v [B, K, S, h]; length, positions and mask of B R rows.
      first: int32[B R], the first slot of the prefix that each row sees; None: 0.

    Raises: NotImplementedError for an int8 prefix.
    """
    if isinstance(prefix_k, Quantized):
        raise NotImplementedError("rows cannot share a prefix of int8")
    prefix_k, prefix_v = of_layer(prefix_k, layer), of_layer(prefix_v, layer)
    (many, t, heads, dim), (batch, kv_heads, slots, _) = q.shape, prefix_k.shape
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, many // batch, t, kv_heads, heads // kv_heads, dim)
    by_row = lambda x: x.reshape(batch, many // batch, *x.shape[1:])

    slot = jnp.arange(slots)
    sees = slot < length[:, None, None]  # [B R, 1, S]
    if first is not None:
        sees &= slot >= first[:, None, None]
    sees = jnp.broadcast_to(sees, (many, t, slots))
    if window is not None:
        sees &= slot > positions[:, :, None] - window
        near = positions if key_positions is None else key_positions
        mask = mask & (near[:, None, :] > positions[:, :, None] - window)

    def scores(form, keys, visible):
        s = jnp.einsum(form, q, factors(keys, q.dtype)[0], preferred_element_type=jnp.float32)
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        return jnp.where(by_row(visible)[:, :, :, None, None], s, NEG)

    old = scores("brtkgh,bksh->brtkgs", prefix_k, sees)
    new = scores("brtkgh,brkmh->brtkgm", by_row(k), mask)
    weights = jax.nn.softmax(jnp.concatenate([old, new], -1), -1).astype(q.dtype)
    # Heads before queries, as CPUs want products of bfloat16: [b, k, r t g, s] and [b r, k, t g, m].
    of_old, of_new = jnp.moveaxis(weights[..., :slots], 3, 1), jnp.moveaxis(weights[..., slots:], 3, 2)
    rows = lambda x, batch: x.reshape(batch, kv_heads, -1, x.shape[-1])
    weighted = lambda w, values: jnp.einsum("bkqs,bksh->bkqh", w, values, preferred_element_type=jnp.float32)
    old = weighted(rows(of_old, batch), factors(prefix_v, q.dtype)[0]).reshape(*of_old.shape[:-1], dim)
    new = weighted(rows(of_new, many), v.astype(q.dtype)).reshape(*of_new.shape[:-1], dim)
    out = jnp.moveaxis(old, 1, 3) + jnp.moveaxis(new, 2, 3)
    return out.astype(q.dtype).reshape(many, t, heads, dim)
