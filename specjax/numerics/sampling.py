"""Sampling: temperature, top-k, top-p and min-p, and the random draws of the library.

Draws use all 32 random bits of a float32, where JAX's uniform numbers use 23. With 23 bits a token of probability 1e-7
is drawn half as often as it should be, because its noise never exceeds 16. Here the steps of the noise are finest
(2^-32) where rare tokens win. A token of 1e-9 is drawn 0.998 times as often as it should be, and one of 2.3e-10 (2^-32)
0.96 times. Rarer tokens lose more; together they are at most 6e-5 of the mass of 262,144 tokens. The cost is within a
tenth of the cost with 23 bits (docs/verifiers.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import first_largest
from specjax.errors import UsageError
from specjax.numerics.thresholds import top_k_mask, top_p_mask
from specjax.types import Array, Sampling

COLDEST = 1e-30
"""Lower temperatures are raised to this one, because logits of 3e8 would overflow float32."""
HOTTEST = 1e30
"""Higher temperatures, including infinity, are lowered to this one. All finite logits are 0 then."""


def warp(logits: Array, sampling: Sampling) -> Array:
    """Apply temperature, top-k, top-p and min-p, in this order.

    Ties: top-k keeps the lower ids, so exactly k tokens survive; top-p takes equal tokens by id. The token that crosses
    `top_p` stays. min-p drops tokens with less than `min_p` times the probability of the likeliest token (Nguyen et
    al.: Turning Up the Heat, 2024, arXiv 2407.01082). A temperature of 0 keeps only the first largest logit.

    Args:
      logits: float[B, ..., V]. sampling: fields are None, scalars or [B].

    Returns: float32[B, ..., V], -inf where a token cannot be drawn; not normalised.
    """
    if sampling.temperature is None:
        return _only(first_largest(logits), logits.shape[-1])
    shape = logits.shape
    # Rows of V, because an axis of one node would fill a tile of eight sublanes of a TPU.
    per_row = lambda value: None if value is None else _per_row(value, shape)
    rows = logits.reshape(-1, shape[-1]).astype(jnp.float32)
    return _warp_rows(rows, Sampling(*map(per_row, sampling))).reshape(shape)


def _per_row(value: Array, shape: tuple[int, ...]) -> Array:
    """Return a setting of logits [B, ..., V] for their flattened rows: a scalar, or [rows, 1] if it is [B]."""
    value = jnp.asarray(value)
    return value if not value.ndim else jnp.repeat(value, math.prod(shape[1:-1]))[:, None]


def _warp_rows(logits: Array, sampling: Sampling) -> Array:
    """Return the warped logits float32[R, V] of sampled rows. The settings are scalars or [R, 1]."""
    assert sampling.temperature is not None
    scale, is_sampled = temperature_of(sampling.temperature)
    greedy, largest = _only(first_largest(logits), logits.shape[-1]), jnp.max(logits, -1, keepdims=True)
    # Filters compare logits that are not scaled. Scaled ones of a tiny temperature are too coarse for a difference from
    # the largest, and a compiler may round the two quotients differently.
    if (k := sampling.top_k) is not None:
        logits = _filtered(is_sampled & (k < logits.shape[-1]), lambda x: top_k_mask(x, k), logits)
    if (mass := sampling.top_p) is not None:
        logits = _filtered(is_sampled & (mass < 1), lambda x: top_p_mask((x - largest) / scale, mass), logits)
    if sampling.min_p is not None:
        share = sampling.min_p.astype(jnp.float32)
        threshold = largest + scale * jnp.log(share)  # 0 drops no token; the likeliest always stays
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    logits = logits / scale
    return jnp.where(is_sampled, logits, greedy)


def temperature_of(temperature: Array) -> tuple[Array, Array]:
    """Return the divisor of logits float32[...] for a temperature [...], and bool[...]: false for greedy rows."""
    temperature = temperature.astype(jnp.float32)
    is_sampled = temperature > 0
    return jnp.where(is_sampled, jnp.clip(temperature, COLDEST, HOTTEST), 1.0), is_sampled


def filter_logits(logits: Array, sampling: Sampling) -> Array:
    """Apply top-k, top-p and min-p at temperature 1, whatever the temperature: float32[B, ..., V]."""
    return warp(logits, sampling._replace(temperature=jnp.float32(1)))


def is_greedy(sampling: Sampling, batch: int) -> Array:
    """Return bool[B]: the rows with temperature 0."""
    if sampling.temperature is None:
        return jnp.ones((batch,), bool)
    return jnp.broadcast_to(sampling.temperature == 0, (batch,))


def _filtered(is_active: Array, mask: Callable[[Array], Array], logits: Array) -> Array:
    """Mask the logits. The mask is not computed if no row needs it."""
    return jax.lax.cond(jnp.any(is_active), lambda x: jnp.where(mask(x), x, -jnp.inf), lambda x: x, logits)


def draw(keys: Array, logits: Array) -> Array:
    """Draw one token per row by a Gumbel race: int32[B] from keys [B] and warped logits float32[B, V]."""
    return first_largest(logits + noise(keys, logits.shape[-1]))


def noise(keys: Array, vocab: int) -> Array:
    """Return Gumbel noise float32[..., V] of keys [...]. The noise of a token depends only on the key and its id."""
    return gumbel(_bits(keys, vocab))


def uniform(keys: Array, count: int) -> Array:
    """Return uniform float32[..., count] in (0, 1) of keys [...], in steps of 2^-32 near 0 and of 2^-24 near 1."""
    x = _centred(_bits(keys, count))
    return jnp.where(x < 0, jnp.minimum(1 + x, 1 - 2.0**-24), x)


def normal(keys: Array, count: int) -> Array:
    """Return standard normal float32[..., count] of keys [...], bounded by 6.2 in absolute value."""
    x = _centred(_bits(keys, count))
    return jnp.copysign(jax.scipy.special.ndtri(jnp.abs(x)), -x)


def gumbel(bits: Array) -> Array:
    """Return Gumbel noise float32 of random uint32, elementwise: -log(-log(u)) at u = (bits + 1/2) / 2^32."""
    x = _centred(~bits)  # 1 - u: float32 is finest around 0, so u near 1 must be represented there
    # -log(1 - x). The series is accurate to 5e-6 below 2^-8. Its products by powers of two are exact. So the result
    # does not depend on which of them a compiler fuses into sums, and equal keys have equal noise in every program.
    exponential = jnp.where((x > 0) & (x < 2.0**-8), x * (1 + x / 2), -jnp.log(jnp.where(x < 0, -x, 1 - x)))
    return -jnp.log(exponential)


def _bits(keys: Array, count: int) -> Array:
    """Return random bits uint32[..., count] of keys [...]."""
    keys = threefry(keys)
    flat = jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(keys.reshape(-1))
    return flat.reshape(*keys.shape, count)


def _centred(bits: Array) -> Array:
    """Return (bits + 1/2) / 2^32, minus 1 above 1/2: float32 in [-1/2, 1/2], finest next to 0 on both sides."""
    signed = jax.lax.bitcast_convert_type(bits, jnp.int32)
    return (signed.astype(jnp.float32) + 0.5) * 2.0**-32


def entropy(log_p: Array) -> Array:
    """Return the entropy in nats, float32[...], of normalised log-probabilities float32[..., V]."""
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), -1)


DRAFT, VERIFY = 0, 1  # purposes of random keys


def node_keys(keys: Array, length: Array, depth: Array) -> Array:
    """Return keys [B, N] for the positions of the children of tree nodes.

    The target draws its own tokens with these keys. They do not depend on the draft or on the step.

    Args:
      length: committed tokens [B]. depth: int32[B, N], depth of each node.
    """
    return fold_in(fold_in(keys[:, None], length[:, None] + depth), VERIFY)


def row_keys(key: Array | int, batch: int) -> Array:
    """Return independent keys [B]: `fold_in(key, b)` of one key, or the given keys of the rows.

    Args:
      key: any form that `threefry` accepts.

    Raises: UsageError for another number of keys, or for a value that is not a key.
    """
    keys = threefry(key)
    if keys.ndim == 0:
        return fold_in(keys, jnp.arange(batch))
    if keys.shape != (batch,):
        raise UsageError(f"key must be one key or one per row: got shape {keys.shape} for {batch} rows")
    return keys


def fold_in(keys: Array, data: Array | int) -> Array:
    """Apply `jax.random.fold_in` to keys and int32 data of broadcastable shapes."""
    return _fold_in(threefry(keys), data)


_fold_in = jnp.vectorize(jax.random.fold_in)


def threefry(keys: Array | int) -> Array:
    """Convert keys of any implementation to threefry2x32 keys. Keys of that implementation are returned unchanged.

    Under `vmap`, JAX draws the bits of rbg and unsafe_rbg from the first key of the batch, so all rows would get the
    same noise. Every draw of this library therefore uses this function.

    Args:
      keys: typed keys, `jax.random.PRNGKey` arrays uint32[..., words], or one integer seed, also as a signed array
        without axes. A seed gives the key of `jax.random.key(seed)`; a 64-bit seed gives the key that JAX creates under
        `jax_enable_x64`. A traced seed has 32 bits.

    Raises: UsageError for any other value.
    """
    if isinstance(keys, (int, np.integer)):
        if not -(1 << 63) <= keys < 1 << 63:
            raise UsageError("a seed must fit 64 bits")
        seed, low = int(keys), (1 << 32) - 1
        high = 0 if -(1 << 31) <= seed <= low else seed >> 32 & low
        words = jnp.array([high, seed & low], jnp.uint32)
        return jax.random.wrap_key_data(words, impl="threefry2x32")
    dtype = getattr(keys, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.signedinteger) and not keys.ndim:
        if not isinstance(keys, jax.core.Tracer):
            return threefry(int(keys))
        words = jnp.stack([jnp.zeros((), jnp.uint32), keys.astype(jnp.uint32)])
        return jax.random.wrap_key_data(words, impl="threefry2x32")
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if typed and str(jax.random.key_impl(keys)) == "threefry2x32":
        return keys
    if not typed and (dtype != jnp.uint32 or not keys.ndim):
        raise UsageError(f"key must be a jax.random.key, a PRNGKey array or a seed, not {keys!r}")
    words = jax.random.key_data(keys) if typed else jnp.asarray(keys)
    if not typed and words.shape[-1] == 2:
        return jax.random.wrap_key_data(words, impl="threefry2x32")
    folded = threefry(0)
    for word in range(words.shape[-1]):
        folded = _fold_in(folded, words[..., word])
    return folded


def _only(token: Array, vocab: int) -> Array:
    """Return logits from which only `token` can be drawn."""
    return jnp.where(jnp.arange(vocab) == token[..., None], 0.0, -jnp.inf)
