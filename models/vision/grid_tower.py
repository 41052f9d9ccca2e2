"""Image towers of Qwen: patches of images of any size, rotated by their rows and columns."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers as L
from specjax.models.rotary import Rotation, rope_frequencies
from specjax.models.vision.config import TowerSizes, VisionLanguageConfig
from specjax.models.vision.grids import patch_places
from specjax.models.vision.tower import TowerBlock
from specjax.models.vision.windows import sort_by_window, undo_order
from specjax.types import Array

ROPE_BASE = 10_000.0
"""The rotary base of towers."""


class PatchProjection(nnx.Module):
    """A linear map of patches whose numbers are in one row."""

    def __init__(self, c: TowerSizes, *, dtype, rngs: nnx.Rngs):
        shape = c.width, c.channels, c.frames, c.patch_size, c.patch_size
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * np.prod(shape[1:]) ** -0.5)
        self.bias = nnx.Param(jnp.zeros((c.width,), dtype)) if c.patch_bias else None

    def __call__(self, patches: Array) -> Array:
        """Return a vector [S, D] for each patch [S, F]."""
        kernel = self.kernel[...]
        x = L.matmul(patches.astype(kernel.dtype), kernel.reshape(len(kernel), -1))
        return x if self.bias is None else x + self.bias[...]


class GridTower(nnx.Module):
    """An image tower for images of any size. `__call__` reads one image."""

    def __init__(self, c: TowerSizes, *, dtype, rngs: nnx.Rngs):
        self.sizes = c
        self.patch = PatchProjection(c, dtype=dtype, rngs=rngs)
        table = lambda rows: nnx.Param(jax.random.normal(rngs.params(), (rows, c.width), dtype) * c.width**-0.5)
        self.positions = nnx.Dict(table=table(c.table_side**2)) if c.table_side else None
        self.layers = nnx.List([TowerBlock(c, dtype=dtype, rngs=rngs) for _ in range(c.num_layers)])

    def __call__(self, patches: Array, grid: Array) -> Array:
        """Return the vectors [S, D] of the patches [S, F] of an image with `grid` int32[2] rows and columns.

        With `deep_layers` the result is [1 + L, S, D], and the outputs of these layers follow that of the last one.
        """
        c, count = self.sizes, len(patches)
        rows, columns = patch_places(grid[0], grid[1], count, c.merge)
        visible = jnp.arange(count) < grid[0] * grid[1]
        x, windows, order = self.patch(patches), None, jnp.arange(count)
        if self.positions is not None:
            x = x + stretch_table(self.positions["table"][...], rows, columns, grid).astype(x.dtype)
        if c.window:
            order, windows = sort_by_window(rows, columns, visible, grid[1], c.window)
            x, rows, columns = x[order], rows[order], columns[order]
        frequencies = rope_frequencies(c.width // c.num_heads // 2, ROPE_BASE)
        axes = [jnp.broadcast_to(axis[:, None], (count, len(frequencies))) for axis in (rows, columns)]
        rotation = Rotation.at(jnp.concatenate(axes, 1)[None], jnp.concatenate([frequencies] * 2))

        # `jit` lets equal layers share one trace.
        @functools.partial(jax.jit, static_argnums=(0, 1))
        def run_layer(graphdef, is_windowed, state, x):
            return nnx.merge(graphdef, state)(x, visible, rotation, windows if is_windowed else None)

        deep = []
        for i, block in enumerate(self.layers):
            graphdef, state = nnx.split(block)
            x = run_layer(graphdef, windows is not None and i not in c.full_layers, state, x)
            deep += [x] if i in c.deep_layers else []
        x = x if windows is None else undo_order(x, order)
        return jnp.stack([x, *deep]) if deep else x


def stretch_table(table: Array, rows: Array, columns: Array, grid: Array) -> Array:
    """Return the position vectors float32[S, D] of patches at rows and columns int32[S] of a grid int32[2].

    The square table [side * side, D] is stretched over the image: their corners agree, and the rest is interpolated
    bilinearly.
    """
    side = math.isqrt(len(table))

    def taps(place: Array, size: Array) -> tuple[Array, Array]:
        at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)
        low = jnp.floor(at)
        index = jnp.stack([low, low + 1], -1).astype(jnp.int32)
        return jnp.minimum(index, side - 1), jnp.stack([1 - (at - low), at - low], -1)

    (row, row_weight), (column, column_weight) = taps(rows, grid[0]), taps(columns, grid[1])
    corners = table[row[:, :, None] * side + column[:, None]].astype(jnp.float32)
    return jnp.einsum("sij,sijd->sd", row_weight[:, :, None] * column_weight[:, None], corners)


class MergeConnector(nnx.Module):
    """An MLP over the joined vectors of each block of patches (Qwen2-VL)."""

    def __init__(self, c: VisionLanguageConfig, *, joins_first: bool = False, rngs: nnx.Rngs):
        """Create the modules. `joins_first`: the norm is over joined vectors."""
        self.joined_width = c.tower.width * c.tower.merge**2
        norm, width = L.RMSNorm if c.tower.gated else L.LayerNorm, self.joined_width if joins_first else c.tower.width
        self.norm, self.norm_width = norm(width, c.tower.norm_eps, dtype=c.dtype), width
        self.up = L.Linear(self.joined_width, self.joined_width, bias=True, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(self.joined_width, c.width, bias=True, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Return the vectors [P, D] of an image with patches [S, W], whose blocks are in a row."""
        y = self.up(self.norm(x.reshape(-1, self.norm_width)).reshape(-1, self.joined_width))
        return self.down(jax.nn.gelu(y, approximate=False).astype(x.dtype))


class DeepConnector(nnx.Module):
    """A `MergeConnector` for the last layer of a tower, and one for each of its `deep_layers` (Qwen3-VL)."""

    def __init__(self, c: VisionLanguageConfig, *, rngs: nnx.Rngs):
        self.last = MergeConnector(c, rngs=rngs)
        self.deep = nnx.List([MergeConnector(c, joins_first=True, rngs=rngs) for _ in c.tower.deep_layers])

    def __call__(self, x: Array) -> Array:
        """Return the vectors [1 + L, P, D] of an image with patches [1 + L, S, W]."""
        return jnp.stack([merge(part) for merge, part in zip((self.last, *self.deep), x, strict=True)])
