"""Draws under top-k or top-p without the threshold of the filter.

Both filters keep the tokens that rank first, until their number or their mass is reached. A draw is a Gumbel race. If
the winner among all tokens is kept, it is also the winner among the kept tokens, and the draw is complete. It is not
kept if the tokens that rank above it reach the number or the mass. No token below it is kept then, so the race is
repeated among the tokens above. No threshold is computed.

Each race is one pass over the vocabulary. The token of rank i wins the race among the first i with the probability
p_i / (p_1 + ... + p_i), independently of the others. With kept mass m, the number of repetitions is therefore at most
that of the Poisson distribution with mean -ln m, whatever the logits are. The mean is 0.11 for a top-p of 0.9, and the
slowest of 64 rows repeats its race 1.29 times. A threshold takes four to eight passes (`specjax.numerics.thresholds`).

By the compiler's schedule for a v5e, a draw of 64 rows with 262,144 tokens takes 0.62 ms, and 2.21 ms with a threshold
of top-p. With races it takes 1.53 ms. Three decisions account for the gain: the noise is computed once, a race reads
logits and scores in one reduction, and the masked logits are never written.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp

from specjax.arrays import scopes
from specjax.arrays.indexing import first_largest, take_along
from specjax.numerics.sampling import draw, noise, temperature_of, warp
from specjax.types import Array, Sampling


def draw_warped(keys: Array, logits: Array, sampling: Sampling) -> Array:
    """Draw one token per row, int32[B]. The tokens are those of `draw(keys, warp(logits, sampling))`.

    The two can differ only where rounding decides which token crosses the mass of top-p.

    Args:
      keys: [B]. logits: float[B, V]. sampling: fields are None, scalars or [B].
    """
    if sampling.temperature is None or (sampling.top_k is None and sampling.top_p is None):
        return draw(keys, warp(logits, sampling))
    if sampling.top_k is not None and sampling.top_p is not None:  # the mass is that of the k likeliest tokens
        logits = warp(logits, Sampling(sampling.temperature, sampling.top_k))
        sampling = sampling._replace(temperature=jnp.float32(1), top_k=None)
    logits = logits.astype(jnp.float32)
    scores = warp(logits, sampling._replace(top_k=None, top_p=None)) + noise(keys, logits.shape[-1])
    scores = jax.lax.optimization_barrier(scores)  # otherwise a TPU computes the noise twice
    return _first_kept(logits, scores, sampling)


def expected_races(share: float, rows: int) -> float:
    """Return an upper bound of the expected races of the slowest of `rows` rows, if the filter keeps mass `share`."""
    mean = -math.log(share)
    total, probability, below = 1.0, math.exp(-mean), 0.0  # of the number of repetitions of one row
    for number in itertools.count(1):
        below += probability
        if below**rows > 1 - 1e-6:
            return total
        total += 1 - below**rows
        probability *= mean / number
    raise AssertionError


def _first_kept(logits: Array, scores: Array, sampling: Sampling) -> Array:
    """Return int32[B]: the token with the largest of `scores` float32[B, V] among those that the filter keeps."""
    ids, largest = jnp.arange(logits.shape[-1]), jnp.max(logits, -1, keepdims=True)
    column = lambda value: jnp.broadcast_to(value, (len(logits),))[:, None]
    assert sampling.temperature is not None
    scale, is_sampled = temperature_of(column(sampling.temperature))

    def race_above(token: Array) -> tuple[Array, Array]:
        """Return bool[B], true if the filter keeps `token` int32[B], and the winner among the tokens above it."""
        token = token[:, None]
        value = take_along(logits, token, 1)
        above = (logits > value) | ((logits == value) & (ids < token))
        mass = jnp.ones_like(logits) if sampling.top_p is None else jnp.exp((logits - largest) / scale)
        amount, total, winner = _sums_and_winner(jnp.where(above, mass, 0.0), mass, jnp.where(above, scores, -jnp.inf))
        goal = jnp.asarray(sampling.top_k) if sampling.top_p is None else sampling.top_p * total
        # The likeliest token is always kept. In a row with NaN every comparison is False, and the loop ends.
        return ~((amount > 0) & (amount >= goal)), winner

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        token, is_final = state
        is_kept, winner = race_above(token)
        is_final |= is_kept
        return jnp.where(is_final, token, winner), is_final

    keeps_all = ~is_sampled[:, 0]
    if sampling.top_p is not None:
        keeps_all |= sampling.top_p >= 1  # a sum without one token may round to the whole mass
    state = first_largest(scores), keeps_all
    with jax.named_scope(scopes.RACES):
        return jax.lax.while_loop(lambda state: ~jnp.all(state[1]), body, state)[0]


def _sums_and_winner(amount: Array, mass: Array, scores: Array) -> tuple[Array, Array, Array]:
    """Return the sums float32[R] of `amount` and `mass` [R, V], and the index int32[R] of the largest of `scores`."""

    def separately(amount, mass, scores):
        return jnp.sum(amount, -1), jnp.sum(mass, -1), first_largest(scores)

    def in_one_pass(amount, mass, scores):
        def combine(x, y):
            is_first = (x[2] > y[2]) | ((x[2] == y[2]) & (x[3] < y[3]))
            return x[0] + y[0], x[1] + y[1], jnp.maximum(x[2], y[2]), jnp.where(is_first, x[3], y[3])

        ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        start = jnp.float32(0), jnp.float32(0), jnp.float32(-jnp.inf), jnp.int32(scores.shape[1])
        sums = jax.lax.reduce((amount, mass, scores, ids), start, combine, (1,))
        return sums[0], sums[1], jnp.minimum(sums[3], scores.shape[1] - 1)

    return jax.lax.platform_dependent(amount, mass, scores, tpu=in_one_pass, default=separately)
