"""Rotation of queries and keys by the positions of their tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import platforms
from specjax.numerics import reproducible_math
from specjax.types import Array


class Rotation(NamedTuple):
    """Cosines and sines of the angles of a pass's tokens, which all layers with the same frequencies share."""

    cos: Array  # float32[B, T, 1, r], for both halves of the rotated numbers, times the amplitude
    sin: Array  # the same, negative for the first half

    @classmethod
    def at(
        cls, positions: Array, frequencies: Array, amplitude: float | None = None, *, same_bits: bool = False
    ) -> Rotation:
        """Compute the rotation at positions int32[B, T].

        Args:
          positions: can also be int32[B, T, r / 2], with a position for each frequency.
          frequencies: float32[r / 2]. The first r numbers of a head are rotated; the others stay.
          amplitude: factor on the rotated numbers.
          same_bits: make the products with bfloat16 exact.
        """
        by_frequency = positions[..., None] if positions.ndim == 2 else positions
        angle = by_frequency[:, :, None].astype(jnp.float32) * frequencies
        return cls.of_angles(angle, amplitude, same_bits=same_bits)

    @classmethod
    def of_angles(cls, angle: Array, amplitude: Array | float | None = None, *, same_bits: bool = False) -> Rotation:
        """Compute the rotation by angles float32[B, T, 1, r / 2]. The other arguments are as in `at`."""
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if amplitude is not None:
            cos, sin = amplitude * cos, amplitude * sin
        if same_bits:
            cos, sin = reproducible_math.exact_factor(cos), reproducible_math.exact_factor(sin)
        halves = jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)
        # Without the barrier the TPU compiler computes them again in each layer.
        return cls(*jax.lax.optimization_barrier(halves))


def rotate(x: Array, rotation: Rotation, same_bits: bool = False) -> Array:
    """Rotate the halves of x [B, T, H, h], whose first r numbers per head are rotated.

    same_bits: as in `Rotation.at`.
    """
    size, platform = rotation.cos.shape[-1], platforms.of_program()
    y = reproducible_math.as_bfloat16(x) if same_bits else x.astype(jnp.float32)
    if platform == "cpu" or same_bits:
        half = size // 2
        cos, sin = rotation.cos[..., :half], rotation.sin[..., half:]
        a, b, unrotated = jnp.split(y, (half, size), -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, unrotated], -1).astype(x.dtype)
    exchange = _exchange_by_shifts if platform == "tpu" else _exchange_by_flip
    halves = y[..., :size]
    rotated = (halves * rotation.cos + exchange(halves) * rotation.sin).astype(x.dtype)
    return rotated if x.shape[-1] == size else jnp.concatenate([rotated, x[..., size:]], -1)


def _exchange_by_shifts(y: Array) -> Array:
    """Exchange the halves of y [B, T, H, r]. The TPU compiler fuses paddings of positive and negative size."""
    half = y.shape[-1] // 2
    shift = lambda count: jax.lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0)] * 3 + [(count, -count, 0)])
    return shift(half) + shift(-half)


def _exchange_by_flip(y: Array) -> Array:
    """Exchange the halves of y [B, T, H, r]. XLA on GPUs fuses no later operation into a concatenation."""
    return jnp.flip(y.reshape(*y.shape[:-1], 2, -1), -2).reshape(y.shape)
