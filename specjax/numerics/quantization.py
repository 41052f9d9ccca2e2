"""Symmetric int8 quantization of vectors with one float32 scale per vector: x is approximately values * scale.

The largest absolute element of a vector sets its scale, so each element is off by at most 1/254 of the largest. This is
absmax quantization per vector as in Dettmers et al.: LLM.int8() (2022), arXiv 2208.07339, without separate outliers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.types import Array

LEVELS = 127
BITS = jnp.uint16  # dtype of arrays that store the bits of bfloat16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An array [..., n, h] stored as n vectors of h elements. Its shape, length and indices are those of `values`."""

    values: Array  # int8[..., n, h]
    scale: Array  # float32[..., n]; without an axis h, so that n is the lane axis on a TPU

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self):
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index) -> Quantized:
        """Index leading axes, such as the layers of a stack."""
        return Quantized(self.values[index], self.scale[index])


def quantize(x: Array) -> Quantized:
    """Quantize x [..., h] to 255 levels between minus and plus its largest absolute element. Zero stays zero."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), -1) / LEVELS
    step = jnp.where(scale > 0, scale, 1.0)[..., None]
    return Quantized(jnp.round(x / step).astype(jnp.int8), scale)


def dequantize(x: Quantized) -> Array:
    """Return float32 of the shape of `x`."""
    return x.values.astype(jnp.float32) * x.scale[..., None]
