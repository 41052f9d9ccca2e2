"""From logits to the distribution that is sampled: temperature, then top-k, then top-p, without sorting the vocabulary.

Sorting 150,000 logits per node is the classic hidden cost of sampled decoding. The k-th largest value and the nucleus
threshold are found instead by fixing the bits of a float from the top: 32 counting passes, whatever the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array, Sampling


def warp(logits: Array, sampling: Sampling) -> Array:
    """Apply temperature, top-k and top-p, in this order.

    Ties: top-k keeps the lower ids, so exactly k tokens survive; top-p takes equal tokens by id. The token that crosses
    `top_p` stays. A temperature of 0 leaves the first largest logit alone.

    Args:
      logits: float[B, ..., V]. sampling: fields are None, scalars or [B].

    Returns: float32[B, ..., V], -inf where a token cannot be drawn; not normalised.
    """
    logits = logits.astype(jnp.float32)

    def per_row(value):
        value = jnp.asarray(value)
        return value.reshape(value.shape + (1,) * (logits.ndim - value.ndim)) if value.ndim else value

    if sampling.temperature is None:
        return _only(jnp.argmax(logits, -1), logits.shape[-1])
    temperature = per_row(sampling.temperature).astype(jnp.float32)
    greedy = _only(jnp.argmax(logits, -1), logits.shape[-1])
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    if sampling.top_k is not None:
        logits = jnp.where(_top_k_mask(logits, per_row(sampling.top_k)), logits, -jnp.inf)
    if sampling.top_p is not None:
        logits = jnp.where(_top_p_mask(logits, per_row(sampling.top_p)), logits, -jnp.inf)
    return jnp.where(temperature > 0, logits, greedy)


def draw(keys: Array, logits: Array) -> Array:
    """One token per row: int32[B] from keys [B] and warped logits float32[B, V] (a Gumbel race)."""
    return jnp.argmax(logits + noise(keys, logits.shape[-1]), -1).astype(jnp.int32)


def noise(keys: Array, vocab: int) -> Array:
    """Gumbel noise float32[..., V] of keys [...]. A token's noise depends on the key and its id alone."""
    flat = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys.reshape(-1))
    return flat.reshape(*keys.shape, vocab)


def entropy(log_p: Array) -> Array:
    """Entropy in nats, float32[...], of normalised log-probabilities float32[..., V]."""
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), -1)


def node_keys(keys: Array, length: Array, depth: Array) -> Array:
    """Keys [B, N] of the positions that the children of nodes at `depth` int32[B, N] below a text of `length` [B] take.

    They are those of the target's own draws: equal whatever was drafted, in any round.
    """
    keys = jax.vmap(fold_in, (None, 1), 1)(keys, length[:, None] + depth)
    return jax.vmap(fold_in, (1, None), 1)(keys, jnp.full_like(length, VERIFY))


DRAFT, VERIFY = 0, 1  # purposes of random keys


def row_keys(key: Array, batch: int) -> Array:
    """Keys [B]: `fold_in(key, b)` of one key, or the keys given per row.

    Raises: UsageError for any other number of them.
    """
    if key.ndim == 0:
        return fold_in(jnp.broadcast_to(key, (batch,)), jnp.arange(batch))
    if key.shape != (batch,):
        raise UsageError(f"key must be one key or one per row: got shape {key.shape} for {batch} rows")
    return key


def fold_in(keys: Array, data: Array) -> Array:
    """`jax.random.fold_in` of keys [B] with int32[B]."""
    return jax.vmap(jax.random.fold_in)(keys, data)


def _only(token: Array, vocab: int) -> Array:
    """Logits that can only draw `token`."""
    return jnp.where(jnp.arange(vocab) == token[..., None], 0.0, -jnp.inf)


def _largest(holds, shape) -> Array:
    """The largest uint32 t of `shape` with `holds(t)`, for a condition that holds at 0 and never returns."""

    def body(i, t):
        higher = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, t)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(shape, jnp.uint32))


def _ordered(x: Array) -> Array:
    """uint32 with the order of float32."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0 makes -0.0 equal to 0.0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _rank_among(tied: Array) -> Array:
    """How many tied tokens have a lower id: int32[..., V]."""
    return jnp.cumsum(tied, -1, dtype=jnp.int32) - 1


def _top_k_mask(logits: Array, k: Array) -> Array:
    x = _ordered(logits)
    count = lambda chosen: jnp.sum(chosen, -1, keepdims=True, dtype=jnp.int32)
    shape = (*logits.shape[:-1], 1)
    kth = _largest(lambda t: count(x >= t) >= k, shape)
    tied = x == kth
    return (x > kth) | (tied & (_rank_among(tied) < k - count(x > kth)))


def _top_p_mask(logits: Array, top_p: Array) -> Array:
    p = jax.nn.softmax(logits, -1)
    x = _ordered(p)
    mass = lambda chosen: jnp.sum(jnp.where(chosen, p, 0.0), -1, keepdims=True)
    shape = (*logits.shape[:-1], 1)
    crossing = _largest(lambda t: mass(x >= t) >= top_p, shape)
    tied = x == crossing
    before = mass(x > crossing) + _rank_among(tied) * p
    return (x > crossing) | (tied & (before < top_p)) | (top_p >= 1.0)
