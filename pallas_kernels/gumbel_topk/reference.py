"""Reference implementation of Gumbel top-k in plain jnp, with noise that can be computed for each token alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.numerics import sampling

BLOCK = 64
"""Tokens per block. 128 to 512 take a few per cent more time."""
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def gumbel_topk(keys, logits, k, *, temperature=None, valid=None, first_id=None):
    """Return the k best of noisy logits; see `gumbel_topk` in the package.

    On TPUs XLA makes k passes over the vocabulary.
    """
    scores = mask_invalid(logits, valid).astype(jnp.float32)
    if temperature is not None:
        scores = scores / jnp.asarray(temperature, jnp.float32)[..., None]
    if keys is not None:
        if first_id is None:
            scores = scores + sampling.noise(keys, logits.shape[-1])
        else:
            words = jax.random.key_data(keys)[..., None]
            scores = scores + gumbel(words[..., 0, :], words[..., 1, :], first_id + jnp.arange(logits.shape[-1]))
    scores, ids = blocked_top_k(scores + 0.0, k)  # + 0.0: top_k sorts 0.0 before -0.0, for any ids
    return (ids if first_id is None else ids + first_id), scores


def blocked_top_k(scores, k):
    """Return `jax.lax.top_k(scores [R..., V], k)` without comparing every token.

    Of equal scores the lower id comes first. The k best lie in the k blocks with the largest maxima. The eight best of
    16 rows of 49,152 logits on two cores, after the head that computes them, take 0.3 ms instead of 1.7.
    """
    leading, vocab = scores.shape[:-1], scores.shape[-1]
    if vocab % BLOCK or vocab < 8 * k * BLOCK:
        return jax.lax.top_k(scores, k)
    blocks = scores.reshape(*leading, vocab // BLOCK, BLOCK)
    blocks_kept = jnp.sort(jax.lax.top_k(jnp.max(blocks, -1), k)[1], -1)  # increasing, so that lower ids stay in front
    candidates = take_along(blocks, blocks_kept[..., None], -2).reshape(*leading, k * BLOCK)
    top, place = jax.lax.top_k(candidates, k)
    return top, take_along(blocks_kept, place // BLOCK, -1) * BLOCK + place % BLOCK


def mask_invalid(logits, valid):
    """Set logits to -inf where not `valid`; None means that all are valid."""
    return logits if valid is None else jnp.where(valid, logits, -jnp.inf)


def gumbel(word0, word1, ids):
    """Return `specjax.numerics.sampling.noise(key, V)[ids]` from the key's two words, element-wise.

    V is any size above all ids. The noise matches jax with `jax_threefry_partitionable` set, the default. There the 32
    bits of element i are the two outputs of Threefry-2x32 for the counter (0, i), XORed.

    Args: word0, word1: uint32, the key. ids: int32. All broadcast to one shape.

    Returns: float32.
    """
    return sampling.gumbel(_threefry(word0, word1, ids.astype(jnp.uint32)))


def _threefry(word0, word1, count):
    """Return the two XORed words uint32 of Threefry-2x32 (Salmon et al. 2011), 20 rounds, of the counter (0, count)."""
    schedule = word0, word1, word0 ^ word1 ^ jnp.uint32(0x1BD11BDA)
    x0, x1 = word0, word1 + count
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << jnp.uint32(distance)) | (x1 >> jnp.uint32(32 - distance)))
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + (schedule[(group + 2) % 3] + jnp.uint32(group + 1))
    return x0 ^ x1
