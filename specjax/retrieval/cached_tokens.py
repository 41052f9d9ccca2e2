"""Selection of cached tokens that a draft reads in place of the complete cache.

A selection is the slots int32[..., budget] of the selected tokens in the order of the text. S, the number of slots of
the cache, marks places without a token. They come last.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Array

SMOOTHED = 5  # tokens over which the mean of the attention is taken
QUERIES = 16  # queries whose attention to a whole text is computed at once


def ends_of_text(cached: Array, num_slots: int, budget: int, sinks: int) -> Array:
    """Select the first `sinks` tokens and the most recent ones, int32[B, budget].

    cached: int32[B], number of cached tokens. Source: StreamingLLM, arXiv 2309.17453.
    """
    place = jnp.arange(budget)
    skipped = jnp.maximum(cached - budget, 0)[:, None]
    slots = jnp.where(place < sinks, place, place + skipped)
    return jnp.where(slots < cached[:, None], slots, num_slots)


def attention_weights(query: Array, positions: Array, key: Array) -> Array:
    """Return the attention of tokens to a text, float32[B, K, H / K, T, S].

    Args:
      query: float[B, T, H, h], rotated and scaled. positions: int32[B, T] of the tokens.
      key: float[B, K, S, h], of all tokens. Each token attends to the slots up to its position.
    """
    is_visible = jnp.arange(key.shape[2]) <= positions[:, None, None, :, None]  # [B, 1, 1, T, S]
    scores = jnp.einsum("btkgh,bksh->bkgts", _by_group(query, key), key.astype(jnp.float32))
    return jax.nn.softmax(jnp.where(is_visible, scores, -jnp.inf), -1)


def most_attended(query: Array, positions: Array, key: Array, cached: Array, budget: int) -> Array:
    """Select the last T tokens and those to which they attend most, int32[B, K, budget].

    Args:
      query: float[B, T, H, h] of the last tokens, rotated and scaled. positions: int32[B, T], increasing.
      key: float[B, K, S, h], of all tokens. cached: int32[B].

    The attention is a sum over the T tokens and the heads of a group, and a mean over SMOOTHED neighbours. Source:
    SnapKV, arXiv 2404.14469.
    """
    slot = jnp.arange(key.shape[2])
    weights = attention_weights(query, positions, key)
    attention = jnp.where(slot < positions[:, :1, None], jnp.sum(weights, (2, 3)), 0)  # of tokens before these
    return _best(jnp.where(slot < positions[:, :1, None], _smooth(attention), jnp.inf), cached, budget)


def most_observed(
    query: Array, key: Array, new_key: Array, start: Array, cached: Array, budget: int, kernel: int
) -> Array:  # fmt: skip
    """Select the tokens to which any of T tokens attends most, int32[B, K, budget], and all from `start` on.

    Args:
      query: float[B, T, H, h] of consecutive tokens from `start` int32[B] on, rotated and scaled.
      key: float[B, K, S, h] of the text. new_key: float[B, K, T, h] of these tokens. cached: int32[B], `start` or more.

    The score is the maximum over the T tokens and the heads of a group, then over `kernel` neighbours before `start`.
    The weights of QUERIES tokens exist at a time. Those of all 161 tokens of eight rows of 32,768 take 5 GB in an 8B
    model.
    Source: SpecKV, arXiv 2506.08373.
    """
    size, count = key.shape[2], query.shape[1]
    is_before = (jnp.arange(size) < start[:, None])[:, None]  # bool[B, 1, S]
    keys = jnp.concatenate([key, new_key.astype(key.dtype)], 2).astype(jnp.float32)
    query = _by_group(query, key)

    def largest(i: Array, importance: Array) -> Array:
        """Take the maximum with the weights of the next queries. The last ones may be taken twice."""
        first = jnp.minimum(i * QUERIES, max(count - QUERIES, 0))
        part = jax.lax.dynamic_slice_in_dim(query, first, min(QUERIES, count), 1)
        index = first + jnp.arange(part.shape[1])
        is_causal = jnp.arange(count) <= index[:, None]
        earlier = jnp.broadcast_to(is_before[:, None, None], (len(start), 1, 1, len(index), size))
        is_visible = jnp.concatenate([earlier, jnp.broadcast_to(is_causal, (*earlier.shape[:-1], count))], -1)
        scores = jnp.einsum("btkgh,bksh->bkgts", part, keys)
        weights = jax.nn.softmax(jnp.where(is_visible, scores, -jnp.inf), -1)
        return jnp.maximum(importance, jnp.max(weights[..., :size], (2, 3)))

    importance = jax.lax.fori_loop(0, -(-count // QUERIES), largest, jnp.zeros((*key.shape[:2], size)))
    importance = jnp.where(is_before, importance, 0)
    pooled = jax.lax.reduce_window(importance, -jnp.inf, jax.lax.max, (1, 1, kernel), (1, 1, 1), "SAME")
    return _best(jnp.where(is_before, pooled, jnp.inf), cached, budget)


def nearest_chunks(query: Array, key: Array, cached: Array, budget: int, chunk: int) -> Array:
    """Select chunks of tokens by the product of their mean key with a query, int32[B, K, budget].

    Args:
      query: float[B, H, h] of the newest token, rotated. key: float[B, K, S, h]. cached: int32[B].
      chunk: tokens per chunk. The budget is rounded down to whole chunks.

    The first and the newest chunk are always selected. Source: TriForce, arXiv 2404.11912.
    """
    batch, heads, num_slots, _ = key.shape
    num_chunks = -(-num_slots // chunk)
    is_text = (jnp.arange(num_slots) < cached[:, None])[:, None, :, None]
    padded = jnp.pad(
        jnp.where(is_text, key.astype(jnp.float32), 0), ((0, 0), (0, 0), (0, num_chunks * chunk - num_slots), (0, 0))
    )
    total = jnp.sum(padded.reshape(batch, heads, num_chunks, chunk, -1), 3)
    first = jnp.arange(num_chunks) * chunk
    size = jnp.clip(cached[:, None] - first, 1, chunk)[:, None, :, None]
    product = jnp.einsum("bkgh,bknh->bkn", _by_group(query[:, None], key)[:, 0], total / size)
    is_newest = (first < cached[:, None]) & (first + chunk >= cached[:, None])
    product = jnp.where((is_newest | (first == 0))[:, None], jnp.inf, product)
    chunks = _best(product, -(-cached // chunk), budget // chunk)  # int32[B, K, budget / chunk]
    slots = (chunks[..., None] * chunk + jnp.arange(chunk)).reshape(*chunks.shape[:-1], -1)
    slots = jnp.pad(slots, [(0, 0)] * (slots.ndim - 1) + [(0, budget - slots.shape[-1])], constant_values=num_slots)
    return jnp.where(slots < cached[:, None, None], slots, num_slots)


def _by_group(query: Array, key: Array) -> Array:
    """Return queries [B, T, H, h] as float32[B, T, K, H / K, h], with zeros for padded entries of heads."""
    query = query.astype(jnp.float32)
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, key.shape[-1] - query.shape[-1])])
    return query.reshape(*query.shape[:2], key.shape[1], -1, key.shape[-1])


def _smooth(x: Array) -> Array:
    """Return the mean over SMOOTHED neighbours on the last axis."""
    reach = SMOOTHED // 2
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(reach, reach)])
    return jnp.mean(jnp.stack([padded[..., i : i + x.shape[-1]] for i in range(SMOOTHED)]), 0)


def _best(scores: Array, count: Array, number: int) -> Array:
    """Return the places of the `number` best among the first `count` int32[B] scores [B, K, S], in order; S: none."""
    size = scores.shape[-1]
    place = jnp.arange(size)
    number = min(number, size)
    _, best = jax.lax.top_k(jnp.where(place < count[:, None, None], scores, -jnp.inf), number)
    return jnp.sort(jnp.where(best < count[:, None, None], best, size), -1)
