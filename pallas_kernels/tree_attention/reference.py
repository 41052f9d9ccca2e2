"""Reference implementation of tree attention in plain jnp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.numerics.quantization import BITS, Quantized

NEG = -1e30


def with_value_size(attend: Callable) -> Callable:
    """Add the argument `value_size` of `tree_attention` to an implementation that lacks it.

    Its values are the complete keys, and the sums are cut. Cutting the cache instead would copy it.
    """

    @functools.wraps(attend)
    def run(q, k, v, prefix_k, prefix_v, *more, value_size=None, **options):
        if value_size is None:
            return attend(q, k, v, prefix_k, prefix_v, *more, **options)
        result = attend(q, k, k, prefix_k, prefix_k, *more, **options)
        if isinstance(result, tuple):
            return result[0][..., :value_size], *result[1:]
        return result[..., :value_size]

    return run


@with_value_size
def tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, products=None, sinks=None, bias=None,
):  # fmt: skip
    """Attend from T new tokens to a cached prefix and to each other.

    The two parts share one softmax and are never concatenated, so the prefix is read once, in place.

    Args:
      q: [B, T, H, h], of the new tokens, rotated.
      k, v: [B, K, M, h], of the tokens outside of the cache, the new ones last (M = T unless a tree grows by levels).
      prefix_k, prefix_v: [B, K, S, h]; slot s is position s, valid below `length` int32[B]. With `layer` they are
        [layers, B, K, S, h], so that a stacked cache need not be split. All four may be `Quantized`: then the int8
        values are multiplied directly, and the scales are applied to the scores and the weights. A uint16 prefix
        contains the bits of bfloat16.
      positions: int32[B, T] of the new tokens.
      mask: bool[B, T, M], the tokens outside of the cache that each new token attends to.
      key_positions: int32[B, M]; None if M = T.
      layer: index into a stacked prefix, or None.
      scale: factor on the scores. window: attend only to keys less than this many positions back (None: all).
      softcap: c in c * tanh(scores / c), or None.
      with_total: also return the logarithm of the sum of the exponentiated scores, float32[B, T, H], which combines
        results over parts of the prefix. The output is float32 then. A token that attends to no key gets about -1e30,
        and an arbitrary finite output.
      products: function that multiplies queries and keys, by default `plain_products`.
      value_size: the values are the first `value_size` numbers of the keys, as in latent attention, and `v` and
        `prefix_v` are not read (None). None: keys and values are separate. `with_value_size` adds this argument.
      sinks: float[H], one more score per head in the softmax, whose weight is dropped (gpt-oss); None: there are none.
      bias: float[H, D], added to the scores of keys by their distance in positions, at most D - 1 (T5); None: nothing.

    Returns: [B, T, H, h], or [B, T, H, value_size].
    """
    prefix_k, prefix_v = select_layer(prefix_k, layer), select_layer(prefix_v, layer)
    t = q.shape[1]
    kv_heads, slots = prefix_k.shape[1:3]
    # Query heads of one kv head are rows of one matrix, for batched matmuls without a transposed copy of the cache.
    q = group_queries(q, kv_heads) * jnp.asarray(scale, q.dtype)

    def scores(keys, visible, keys_at):
        added = distance_scores(bias, positions, keys_at)
        return masked_scores(q, keys, visible, softcap, products or plain_products, added)

    in_prefix, mask = visible_keys(slots, length, positions, mask, key_positions, window)
    new = scores(k, mask, positions if key_positions is None else key_positions)
    if sinks is not None:
        sink = sink_scores(sinks, kv_heads, t)
        top_of, total_of = (lambda top: jnp.maximum(top, sink)), lambda total, top: total + jnp.exp(sink - top)
    else:
        top_of, total_of = (lambda top: top), lambda total, top: total
    if not slots:  # there is no prefix, as in a training pass
        top = top_of(jnp.max(new, -1, keepdims=True))
        new = jnp.exp(new - top)
        total = total_of(jnp.sum(new, -1, keepdims=True), top)
        return finish(weighted_sum(new, v, q.dtype) / total, top, total, t, q.dtype, with_total)
    old = scores(prefix_k, in_prefix, jnp.arange(slots)[None])
    top = top_of(jnp.maximum(jnp.max(old, -1, keepdims=True), jnp.max(new, -1, keepdims=True)))
    old, new = jnp.exp(old - top), jnp.exp(new - top)

    total = total_of(jnp.sum(old, -1, keepdims=True) + jnp.sum(new, -1, keepdims=True), top)
    out = (weighted_sum(old, prefix_v, q.dtype) + weighted_sum(new, v, q.dtype)) / total  # f32[B, K, G*T, h]
    return finish(out, top, total, t, q.dtype, with_total)


def visible_keys(slots: int, length, positions, mask, key_positions, window):
    """Return which slots of the prefix bool[B, T, S] and which new keys bool[B, T, M] each query attends to."""
    slot = jnp.arange(slots)
    in_prefix = jnp.broadcast_to(slot < length[:, None, None], (*positions.shape, slots))
    if window is None:
        return in_prefix, mask
    keys_at = positions if key_positions is None else key_positions
    first = positions[:, :, None] - window  # the last position that a query does not attend to
    return in_prefix & (slot > first), mask & (keys_at[:, None, :] > first)


def finish(out, top, total, t: int, dtype, with_total: bool):
    """Return the result of `tree_attention` from its output float32[B, K, G*T, h].

    top, total: the softmax's maxima and sums [B, K, G*T, 1].
    """
    if not with_total:
        return ungroup_queries(out.astype(dtype), t)
    return ungroup_queries(out, t), ungroup_queries(top + jnp.log(total), t)[..., 0]


def select_layer(prefix, layer):
    """Return the prefix [B, K, S, h] of a layer, cut out of a stack unless `layer` is None."""
    if layer is None:
        return prefix
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), prefix)


def factors(x, dtype):
    """Return keys or values x [..., n, h] as an array of `dtype`, and their scales [..., 1, n] or None."""
    if isinstance(x, Quantized):
        return x.values.astype(dtype), x.scale[..., None, :]
    return (jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == BITS else x), None


def distance_scores(bias, positions, key_positions):
    """Return what `bias` float[H, D] adds to the scores of positions [B, T] and keys [B or 1, n], float32[B, H, T, n].

    The result is None without a bias.
    """
    if bias is None:
        return None
    distance = jnp.clip(positions[:, :, None] - key_positions[:, None, :], 0, bias.shape[1] - 1)
    return jnp.moveaxis(jnp.take(bias.astype(jnp.float32), distance, axis=1), 0, 1)


def masked_scores(q, keys, visible, softcap, products, added=None):
    """Return the scores float32[B, K, G*T, n] of q [B, K, G*T, h] and keys [B, K, n, h].

    They are NEG where not visible bool[B, T, n]. `added` float32[B, H, T, n] is added to them (None: nothing).
    """
    keys, scales = factors(keys, q.dtype)
    s = products(q, keys)
    s = s if scales is None else s * scales
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    batch, t, n = visible.shape
    by_token = s.reshape(batch, s.shape[1], -1, t, n)
    by_token = by_token if added is None else by_token + added.reshape(by_token.shape)
    return jnp.where(visible[:, None, None], by_token, NEG).reshape(s.shape)


def plain_products(x, y):
    """Multiply x [B, K, m, h] and y [B, K, n, h] -> float32[B, K, m, n]."""
    return jax.lax.dot_general(x, y, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def weighted_sum(weights, values, dtype):
    """Multiply weights float32[B, K, G*T, n] and values [B, K, n, h] -> float32[B, K, G*T, h], a product in `dtype`."""
    values, scales = factors(values, dtype)
    weights = weights if scales is None else weights * scales
    return jax.lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )


def empty_sums(q):
    """Return the sums of `online_softmax` for queries q [B, K, G*T, h] before the first keys."""
    shape = (*q.shape[:3], 1)
    return jnp.zeros(q.shape, jnp.float32), jnp.zeros(shape), jnp.full(shape, NEG)


def online_softmax(sums, scores, values, dtype):
    """Add keys to the sums of a softmax that reads its keys in parts.

    Args:
      sums: the weighted sum of the values float32[B, K, G*T, h], the sum of the weights [B, K, G*T, 1], and the largest
        score [B, K, G*T, 1]. `empty_sums` returns the first ones.
      scores: float32[B, K, G*T, n] of the keys. values: [B, K, n, h]. dtype: as in `weighted_sum`.
    """
    weighted, total, top = sums
    new_top = jnp.maximum(top, jnp.max(scores, -1, keepdims=True))
    weights, fade = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    return (
        weighted * fade + weighted_sum(weights, values, dtype),
        total * fade + jnp.sum(weights, -1, keepdims=True),
        new_top,
    )


def group_queries(q, kv_heads: int):
    """Reshape [B, T, H, h] -> [B, K, H/K * T, h]."""
    batch, t, heads, dim = q.shape
    q = q.reshape(batch, t, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
    return q.reshape(batch, kv_heads, -1, dim)


def sink_scores(sinks, kv_heads: int, t: int):
    """Return sinks [H] as scores float32[K, H/K * T, 1] of queries in the form of `group_queries`."""
    return jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1), t, -1)[..., None]


def with_sinks(out, total, sinks):
    """Return attention with sinks [H] from its output [B, T, H, h] without them, and the new total.

    total: float32[B, T, H], as `tree_attention` returns it. The weight of a sink is dropped, so the other weights, and
    with them the output, shrink by one factor.
    """
    sinks = sinks.astype(jnp.float32)
    return out * jax.nn.sigmoid(total - sinks)[..., None], jnp.logaddexp(total, sinks)


def ungroup_queries(out, t: int):
    """Reshape [B, K, H/K * T, h] -> [B, T, H, h]."""
    batch, kv_heads, rows, dim = out.shape
    out = out.reshape(batch, kv_heads, rows // t, t, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, t, -1, dim)
