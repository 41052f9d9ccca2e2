"""The convolutions of DFlash 2 before and after a sublayer, with a few taps within the block.

y_t = sum_j (base_j + dynamic_j(x_t)) * x_{t-j}; slots before the block are zero. The dynamic kernels of both
convolutions are computed from the input of the first one, and groups of channels share them. A new module is the
identity.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.types import Array


class Convolution(nnx.Module):
    """The two convolutions of one sublayer."""

    def __init__(self, width: int, taps: int, group: int, *, dtype, rngs: nnx.Rngs):
        self.taps, self.group = taps, group
        self.base = nnx.Param(jnp.zeros((2, taps, width), dtype).at[:, 0].set(1.0))  # before, after
        self.projection = L.Linear(width, 2 * taps * (width // group), dtype=dtype, rngs=rngs)
        self.projection.weight[...] = jnp.zeros_like(self.projection.weight[...])

    def __call__(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Return the convolution of x [B, b, D], and a function that convolves the sublayer's output."""
        dynamic = self.projection(x).reshape(*x.shape[:2], 2, self.taps, -1)
        kernels = self.base[...] + jnp.repeat(dynamic, self.group, -1)  # [B, b, 2, taps, D]
        return _convolve(x, kernels[:, :, 0]), lambda y: _convolve(y, kernels[:, :, 1])


def _convolve(x: Array, kernels: Array) -> Array:
    """Convolve x [B, b, D] with kernels [B, b, taps, D]."""
    shifted = lambda j: jnp.pad(x, ((0, 0), (j, 0), (0, 0)))[:, : x.shape[1]]
    return sum((kernels[:, :, j] * shifted(j) for j in range(kernels.shape[2])), jnp.zeros_like(x))
