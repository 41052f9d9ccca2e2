"""Rotary frequencies and their scalings."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from specjax.types import Array


class RopeScaling(NamedTuple):
    """Scaling of rotary frequencies.

    `kind` is "linear" (which uses `factor` only), "proportional" (`factor` and `share`), "llama3", "yarn" or
    "longrope".
    """

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192
    amplitude: float = 1.0  # factor on rotated queries and keys (yarn, longrope)
    whole: bool = True  # yarn: round the ends of the blended range to whole dimensions
    short: tuple[float, ...] = ()  # longrope: divisor of each frequency if the model takes short texts only
    long: tuple[float, ...] = ()  # longrope: divisors if it takes texts longer than `original_positions`
    share: float = 1.0  # proportional: the part of the frequencies, the fastest ones, that are not zero


def rope_frequencies(
    dim: int, base: float, scaling: RopeScaling | None = None, max_positions: int | None = None
) -> Array:
    """Compute the rotary frequencies float32[dim / 2], in radians per position.

    LongRoPE (Ding et al. 2024, arXiv 2402.13753) has two sets of divisors. The choice depends on `max_positions`, the
    longest text that the model takes (None: the long set), and not on the current text. Keys are cached after rotation,
    so a text that outgrows `original_positions` would need a new prefill. A long text would also change the other texts
    of its batch. transformers uses the short set for texts or batches up to `original_positions`.
    """
    freq = 1.0 / base ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling is None:
        return freq
    if scaling.kind == "longrope":
        is_short = max_positions is not None and max_positions <= scaling.original_positions
        return freq / jnp.array(scaling.short if is_short else scaling.long, jnp.float32)
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "proportional":
        return jnp.where(jnp.arange(dim // 2) < int(scaling.share * dim // 2), freq / scaling.factor, 0.0)
    if scaling.kind == "yarn":
        return freq * _yarn_factor(dim, base, scaling)
    # Llama 3: long waves are stretched, short waves stay, and those in between are blended.
    waves = scaling.original_positions * freq / (2 * jnp.pi)  # full turns within the original context
    original_share = jnp.clip((waves - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    return freq * (original_share + (1 - original_share) / scaling.factor)


def _yarn_factor(dim: int, base: float, scaling: RopeScaling) -> Array:
    """Compute the YaRN factor float32[dim / 2] of each frequency.

    The factor is blended by dimension, where Llama 3 blends by full turns. Peng, Quesnelle, Fan, Shippole: YaRN:
    Efficient Context Window Extension of Large Language Models (2023), arXiv 2309.00071.
    """
    turns = lambda count: dim * math.log(scaling.original_positions / (count * 2 * math.pi)) / (2 * math.log(base))
    first, last = turns(scaling.high), turns(scaling.low)
    if scaling.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    fraction = jnp.clip((jnp.arange(dim // 2) - first) / (last - first or 0.001), 0.0, 1.0)
    return 1 - fraction + fraction / scaling.factor
