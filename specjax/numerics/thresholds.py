"""Masks of top-k and top-p without a sort of the vocabulary.

A sort of 150,000 logits per row is the classic hidden cost of sampled decoding. Here the k-th largest value and the
nucleus threshold are found digit by digit, from the highest bits of a float. On accelerators a digit has 3 bits: seven
candidates are measured in one pass over the row. The search ends as soon as the threshold separates the tokens that
stay, or after all bits of a float. Every pass is a sum, so a vocabulary that is sharded over devices is not gathered.
If only some of the tokens at the threshold may stay, a bisection over ids finds the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import scopes

Array = jax.Array

ROUNDING = 1e-5
"""Share of the total above which a difference of two sums over the vocabulary is exact enough to count one token."""


PREFIX_BITS, LIKELY = 3, 0x38000000
"""The highest three of 30 bits of a float32 from 2^-15 to 1. Thresholds of top-p are rarely smaller."""


class DigitSearch(NamedTuple):
    """The way in which a platform searches a threshold."""

    bits: int  # bits of a digit
    ends_early: bool  # a loop whose length depends on data costs a copy to the host per iteration on a GPU


class Threshold(NamedTuple):
    """The largest candidate that enough tokens reach."""

    value: Array  # uint32[R, 1], bits of a float
    measure: Array  # [R, 1], measure of the tokens that reach it
    above: Array  # [R, 1], measure of the tokens that reach the next candidate


CPU, TPU, GPU = DigitSearch(1, True), DigitSearch(3, True), DigitSearch(3, False)
"""On CPU every candidate is a pass of its own. On a v5e a pass over 64 rows of 262,144 takes 0.30 ms with one candidate
and 0.21 ms with seven, because one array is read instead of two; fifteen take 0.34 ms (compiler's schedule)."""


def top_k_mask(logits: Array, k: Array) -> Array:
    """Return bool[R, V], true for the `k` largest of logits float32[R, V]. Of equal logits, lower ids are first.

    Args:
      k: int32[] or int32[R, 1].
    """
    return _by_platform(_top_k_mask, logits, k)


def top_p_mask(logits: Array, top_p: Array) -> Array:
    """Return bool[R, V], true for the likeliest tokens up to the one that crosses the mass `top_p`.

    Equal tokens are taken by id. A mass of 1 keeps all tokens.

    Args:
      logits: float32[R, V], at most 0, which is the logit of the likeliest token. top_p: float32[] or float32[R, 1].
    """
    return _by_platform(_top_p_mask, logits, top_p)


def _by_platform(mask: Callable[..., Array], *arguments: Array) -> Array:
    on = lambda search: functools.partial(mask, search)
    return jax.lax.platform_dependent(*arguments, cpu=on(CPU), tpu=on(TPU), default=on(GPU))


def _top_k_mask(search: DigitSearch, logits: Array, k: Array) -> Array:
    x = _ordered(logits)
    is_done = lambda threshold: (threshold.measure == k) | (k >= x.shape[-1])
    threshold = _largest(lambda t: _count(x >= t), k, len(x), 32, search, is_done)
    number = k - threshold.above  # of the tokens at the threshold
    return _select(x, threshold.value, threshold.measure <= k, lambda count: count <= number)


def _top_p_mask(search: DigitSearch, logits: Array, top_p: Array) -> Array:
    # A probability without its normalisation, from 0 to 1: the highest 2 bits are 0.
    # The barrier gives every comparison the same bits. A compiler may compute a fused copy of `exp` differently.
    p = jax.lax.optimization_barrier(jnp.exp(logits))
    mass = lambda t: jnp.sum(jnp.where(p >= _to_float(t), p, 0.0), -1, keepdims=True)
    total = mass(jnp.zeros((len(p), 1), jnp.uint32))
    goal = top_p * total

    def is_single(threshold: Threshold) -> Array:
        """Return True for rows in which a single token reaches the threshold but not the next candidate."""
        each = _to_float(threshold.value)
        is_single = (threshold.measure - threshold.above < 1.5 * each) & (each > ROUNDING * total)
        return is_single | (top_p >= 1.0)

    threshold = _largest(mass, goal, len(p), 30, search, is_single, prefix=LIKELY)
    each = _to_float(threshold.value)
    all_fit = is_single(threshold) | (threshold.measure - each < goal)
    fits = lambda count: threshold.above + (count - 1) * each < goal
    return _select(p, each, all_fit, fits) | (top_p >= 1.0)


def _largest(
    measure: Callable[[Array], Array], goal: Array, num_rows: int, size: int, search: DigitSearch,
    is_done: Callable[[Threshold], Array], prefix: int = 0,
) -> Threshold:  # fmt: skip
    """Find the largest threshold t of `size` bits with `measure(t) >= goal`, per row. The measure falls with t.

    The search may end earlier if `is_done` is true for all rows.

    Args:
      prefix: probable highest PREFIX_BITS of the threshold, in their place. They must be the largest possible ones.
    """

    def digit(threshold: Threshold, shift: Array | int, count: int) -> Threshold:
        """Find the digit of `count` bits at `shift`."""
        t, at_least, above = threshold
        candidates = [t | (jnp.uint32(value) << jnp.uint32(shift)) for value in range(1, 1 << count)]
        measures = [measure(candidate) for candidate in candidates]
        value = sum((x >= goal).astype(jnp.uint32) for x in measures)
        for number, x in enumerate(measures, 1):
            at_least = jnp.where(value == number, x, at_least)
            above = jnp.where(value == number - 1, x, above)
        return Threshold(t | (value << jnp.uint32(shift)), at_least, above)

    num_bits = size - PREFIX_BITS if prefix else size
    passes, remainder = divmod(num_bits, search.bits)
    passes, width = (passes, remainder) if remainder else (passes - 1, search.bits)
    first_digit = lambda threshold: digit(threshold, passes * search.bits, width)
    at = lambda t: Threshold(t, (x := measure(t)), jnp.zeros_like(x))
    zero = jnp.zeros((num_rows, 1), jnp.uint32)
    start = at(zero | jnp.uint32(prefix))
    threshold = first_digit(start)  # in one pass over the row with the start
    if prefix:
        unlikely = lambda: first_digit(digit(at(zero), num_bits, PREFIX_BITS))
        with jax.named_scope(scopes.FLAT):
            threshold = jax.lax.cond(jnp.all(start.measure >= goal), lambda: threshold, unlikely)
    next_digit = lambda shift, threshold: digit(threshold, shift, search.bits)
    if not search.ends_early:
        return jax.lax.fori_loop(
            0, passes, lambda i, threshold: next_digit(search.bits * (passes - 1 - i), threshold), threshold
        )

    def body(carry: tuple[Array, Threshold]) -> tuple[Array, Threshold]:
        shift = carry[0] - search.bits
        return shift, next_digit(shift, carry[1])

    is_open = lambda carry: (carry[0] > 0) & ~jnp.all(is_done(carry[1]))
    with jax.named_scope(scopes.DIGITS):
        return jax.lax.while_loop(is_open, body, (jnp.int32(passes * search.bits), threshold))[1]


def _select(x: Array, threshold: Array, all_fit: Array, fits: Callable[[Array], Array]) -> Array:
    """Select the tokens above the threshold, and as many of those at the threshold as fit, in ascending order of id.

    Args:
      x: [R, V]. threshold: [R, 1]. all_fit: bool[R, 1], true if all tokens at the threshold fit.
      fits: a monotone predicate of a number int32[R, 1] of selected tokens at the threshold.
    """
    # A bisection over ids, because a cumulative sum would gather a vocabulary that is sharded over devices.
    ids = jnp.arange(x.shape[-1], dtype=jnp.int32)

    def body(ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) // 2
        fit = fits(_count((x == threshold) & (ids < middle)))
        return jnp.where(fit, middle, low), jnp.where(fit, high, middle)

    high = jnp.full((len(x), 1), x.shape[-1] + 1, jnp.int32)  # more ids than there are: it never has to fit
    low = jnp.where(all_fit, high, 0)
    with jax.named_scope(scopes.TIES):
        end, _ = jax.lax.while_loop(lambda ends: jnp.any(ends[1] - ends[0] > 1), body, (low, high))
    return (x > threshold) | ((x == threshold) & (ids < end))


def _ordered(x: Array) -> Array:
    """Map float32 to uint32 with the same order."""
    x = jnp.where(x == 0, 0.0, x)  # -0.0 is equal to 0.0; a compiler would remove an addition of 0.0
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _to_float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _count(selected: Array) -> Array:
    """Count the selected tokens: int32[R, 1] of bool[R, V]."""
    return jnp.sum(selected, -1, keepdims=True, dtype=jnp.int32)
