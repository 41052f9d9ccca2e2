"""DFlash 2's convolution of a sublayer: two taps within the block, before it and after it.

y_t = sum_j (base_j + dynamic_j(x_t)) * x_{t-j}; slots before the block are zero. The dynamic kernels of both are read
from what goes into the first, and shared by groups of channels. A new one leaves everything as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.types import Array


class Convolution(nnx.Module):
    """Both convolutions of one sublayer."""

    def __init__(self, width: int, taps: int, group: int, *, dtype, rngs: nnx.Rngs):
        self.taps, self.group = taps, group
        self.base = nnx.Param(jnp.zeros((2, taps, width), dtype).at[:, 0].set(1.0))  # before, after
        self.projection = L.Linear(width, 2 * taps * (width // group), dtype=dtype, rngs=rngs)
        self.projection.weight[...] = jnp.zeros_like(self.projection.weight[...])

    def __call__(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """x [B, b, D] convolved, and what convolves the sublayer's output."""
        dynamic = self.projection(x).reshape(*x.shape[:2], 2, self.taps, -1)
        kernels = self.base[...] + jnp.repeat(dynamic, self.group, -1)  # [B, b, 2, taps, D]
        return _convolve(x, kernels[:, :, 0]), lambda y: _convolve(y, kernels[:, :, 1])


def _convolve(x: Array, kernels: Array) -> Array:
    """x [B, b, D] by kernels [B, b, taps, D]."""
    shifted = lambda j: jnp.pad(x, ((0, 0), (j, 0), (0, 0)))[:, : x.shape[1]]
    return sum((kernels[:, :, j] * shifted(j) for j in range(kernels.shape[2])), jnp.zeros_like(x))
