"""Connectors: the vectors of an image's patches as vectors of the text model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.vision.config import VisionLanguageConfig
from specjax.models.vision.grid_tower import DeepConnector, MergeConnector
from specjax.models.vision.tower import activation_of
from specjax.types import Array


def join_blocks(x: Array, side: int, scale: int) -> Array:
    """Join blocks of `scale` x `scale` neighbours of x [side * side, D] to vectors [(side / scale) ** 2, scale ** 2 D].

    The result is in rows, and a vector has its patches in rows too.
    """
    blocks = x.reshape(side // scale, scale, side // scale, scale, -1).swapaxes(1, 2)
    return blocks.reshape((side // scale) ** 2, -1)


class ShuffleConnector(nnx.Module):
    """Blocks of patches, joined and mapped by one matrix (Idefics3, SmolVLM)."""

    def __init__(self, c: VisionLanguageConfig, *, rngs: nnx.Rngs):
        self.side, self.scale = c.tower.side, c.connector.shuffle
        fan_in = c.tower.width * self.scale**2
        self.proj = L.Linear(fan_in, c.width, bias=c.connector.bias, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Return the vectors [P, D] of an image with patches [S, W]."""
        return self.proj(join_blocks(x, self.side, self.scale))


class PoolConnector(nnx.Module):
    """Averages of blocks of patches, normalised and mapped by one matrix (Gemma 3)."""

    def __init__(self, c: VisionLanguageConfig, *, rngs: nnx.Rngs):
        self.side, self.scale = c.tower.side, c.connector.pool
        self.norm = L.RMSNorm(c.tower.width, c.tower.norm_eps, dtype=c.dtype)
        self.kernel = nnx.Param(
            jax.random.normal(rngs.params(), (c.tower.width, c.width), c.dtype) * c.tower.width**-0.5
        )

    def __call__(self, x: Array) -> Array:
        """Return the vectors [P, D] of an image with patches [S, W]."""
        blocks = join_blocks(x, self.side, self.scale).reshape(-1, self.scale**2, x.shape[-1])
        mean = jnp.mean(blocks.astype(jnp.float32), 1).astype(x.dtype)
        return L.matmul(self.norm(mean), self.kernel[...].T)


class HiddenConnector(nnx.Module):
    """An MLP with one hidden layer over each patch (LLaVA)."""

    def __init__(self, c: VisionLanguageConfig, *, rngs: nnx.Rngs):
        bias = c.connector.bias
        self.up = L.Linear(c.tower.width, c.width, bias=bias, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(c.width, c.width, bias=bias, dtype=c.dtype, rngs=rngs)
        self.act = activation_of(c.connector.activation)
        has_rows = c.any_resolution is not None
        self.row_end = nnx.Dict(vector=nnx.Param(jnp.zeros((c.width,), c.dtype))) if has_rows else None

    def __call__(self, x: Array) -> Array:
        """Return the vectors [P, D] of an image with patches [S, W]."""
        return self.down(self.act(self.up(x)).astype(x.dtype))


def make_connector(c: VisionLanguageConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Create the connector of a model."""
    if c.tower.merge:
        return (DeepConnector if c.tower.deep_layers else MergeConnector)(c, rngs=rngs)
    if c.connector.pool:
        return PoolConnector(c, rngs=rngs)
    return ShuffleConnector(c, rngs=rngs) if c.connector.shuffle else HiddenConnector(c, rngs=rngs)
