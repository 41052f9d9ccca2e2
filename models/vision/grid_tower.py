"""Image tower of Qwen2-VL: patches of images of any size, rotated by their rows and columns."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers as L
from specjax.models.rotary import Rotation, rope_frequencies
from specjax.models.vision.config import TowerSizes, VisionLanguageConfig
from specjax.models.vision.grids import patch_places
from specjax.models.vision.tower import TowerBlock
from specjax.types import Array

ROPE_BASE = 10_000.0
"""The rotary base of towers."""


class PatchProjection(nnx.Module):
    """A linear map of patches whose numbers are in one row."""

    def __init__(self, c: TowerSizes, *, dtype, rngs: nnx.Rngs):
        shape = c.width, c.channels, c.frames, c.patch_size, c.patch_size
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * np.prod(shape[1:]) ** -0.5)

    def __call__(self, patches: Array) -> Array:
        """Return a vector [S, D] for each patch [S, F]."""
        kernel = self.kernel[...]
        return L.matmul(patches.astype(kernel.dtype), kernel.reshape(len(kernel), -1))


class GridTower(nnx.Module):
    """An image tower without a table of positions. `__call__` reads one image."""

    def __init__(self, c: TowerSizes, *, dtype, rngs: nnx.Rngs):
        self.sizes = c
        self.patch = PatchProjection(c, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([TowerBlock(c, dtype=dtype, rngs=rngs) for _ in range(c.num_layers)])

    def __call__(self, patches: Array, grid: Array) -> Array:
        """Return the vectors [S, D] of the patches [S, F] of an image with `grid` int32[2] rows and columns."""
        c, count = self.sizes, len(patches)
        rows, columns = patch_places(grid[0], grid[1], count, c.merge)
        frequencies = rope_frequencies(c.width // c.num_heads // 2, ROPE_BASE)
        axes = [jnp.broadcast_to(axis[:, None], (count, len(frequencies))) for axis in (rows, columns)]
        rotation = Rotation.at(jnp.concatenate(axes, 1)[None], jnp.concatenate([frequencies] * 2))
        visible = jnp.arange(count) < grid[0] * grid[1]
        x = self.patch(patches)

        # `jit` lets equal layers share one trace.
        @functools.partial(jax.jit, static_argnums=0)
        def run_layer(graphdef, state, x):
            return nnx.merge(graphdef, state)(x, visible, rotation)

        for block in self.layers:
            x = run_layer(*nnx.split(block), x)
        return x


class MergeConnector(nnx.Module):
    """An MLP over the joined vectors of each block of patches (Qwen2-VL)."""

    def __init__(self, c: VisionLanguageConfig, *, rngs: nnx.Rngs):
        self.joined_width = c.tower.width * c.tower.merge**2
        self.norm = L.LayerNorm(c.tower.width, c.tower.norm_eps, dtype=c.dtype)
        self.up = L.Linear(self.joined_width, self.joined_width, bias=True, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(self.joined_width, c.width, bias=True, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Return the vectors [P, D] of an image with patches [S, W], whose blocks are in a row."""
        y = self.up(self.norm(x).reshape(-1, self.joined_width))
        return self.down(jax.nn.gelu(y, approximate=False).astype(x.dtype))
