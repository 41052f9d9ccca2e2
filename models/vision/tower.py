"""Image tower of the SigLIP (arXiv 2303.15343) and CLIP (arXiv 2103.00020) forms: pixels to one vector per patch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers as L
from specjax.models.rotary import Rotation, rotate
from specjax.models.vision.config import Activation, TowerSizes
from specjax.models.vision.windows import attend_in_windows
from specjax.pallas_kernels.tree_attention.reference import NEG
from specjax.types import Array


def activation_of(name: Activation):
    """Return an activation function by name."""
    if name == "quick_gelu":
        return lambda x: x * jax.nn.sigmoid(1.702 * x)
    if name == "silu":
        return jax.nn.silu
    return functools.partial(jax.nn.gelu, approximate=name == "gelu_tanh")


class PatchEmbedding(nnx.Module):
    """A linear map of the pixels of each patch."""

    def __init__(self, c: TowerSizes, *, dtype, rngs: nnx.Rngs):
        shape = c.width, c.channels, c.patch_size, c.patch_size
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * np.prod(shape[1:]) ** -0.5)
        self.bias = nnx.Param(jnp.zeros((c.width,), dtype)) if c.patch_bias else None

    def __call__(self, pixels: Array) -> Array:
        """Return a vector [S, D] for each patch of `pixels` [C, H, W], row by row.

        Pixels after the last complete patch of a row or a column are left out. LLaVA-OneVision has six of them.
        """
        kernel = self.kernel[...]
        channels, p = kernel.shape[1], kernel.shape[-1]
        rows, columns = (size // p for size in pixels.shape[1:])
        patches = pixels[:, : rows * p, : columns * p].reshape(channels, rows, p, columns, p).transpose(1, 3, 0, 2, 4)
        x = L.matmul(patches.reshape(-1, channels * p * p).astype(kernel.dtype), kernel.reshape(len(kernel), -1))
        return x if self.bias is None else x + self.bias[...]


class TowerBlock(nnx.Module):
    """A layer of a tower: attention over all patches of an image or of a window, then an MLP."""

    def __init__(self, c: TowerSizes, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(L.Linear, bias=True, dtype=dtype, rngs=rngs)
        norm = L.RMSNorm if c.gated else L.LayerNorm
        self.attention_norm, self.mlp_norm = (norm(c.width, c.norm_eps, dtype=dtype) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(c.width, c.width) for _ in range(4))
        self.up, self.down = linear(c.width, c.mlp_width), linear(c.mlp_width, c.width)
        self.gate = linear(c.width, c.mlp_width) if c.gated else None
        self.num_heads, self.act, self.window_size = c.num_heads, activation_of(c.activation), c.window**2

    def __call__(
        self, x: Array, visible: Array, rotation: Rotation | None = None, windows: Array | None = None
    ) -> Array:
        """Return the stream [S, D] after the layer.

        Args:
          visible: bool[S], the patches that all patches attend to.
          rotation: that of the patches, as a batch of one; None: they have no rotary positions.
          windows: int32[S], the windows of patches in the order of their windows; None: attention is not windowed.
        """
        y = self.attention_norm(x)
        q, k, v = (part(y).reshape(len(x), self.num_heads, -1) for part in (self.q, self.k, self.v))
        if rotation is not None:
            q, k = (rotate(part[None], rotation)[0] for part in (q, k))
        if windows is None:
            scores = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(visible, scores, NEG), -1)
            out = jnp.einsum("hts,shd->thd", weights.astype(v.dtype), v)
        else:
            out = attend_in_windows(q, k, v, windows, self.window_size)
        x = x + self.o(out.reshape(len(x), -1).astype(x.dtype))
        y = self.mlp_norm(x)
        hidden = self.act(self.up(y)) if self.gate is None else self.act(self.gate(y)) * self.up(y)
        return x + self.down(hidden.astype(x.dtype))


class ImageTower(nnx.Module):
    """An image tower. `__call__` reads one image, of which a part may be padding."""

    def __init__(self, c: TowerSizes, *, dtype, rngs: nnx.Rngs):
        self.sizes = c
        norm = lambda exists: L.LayerNorm(c.width, c.norm_eps, dtype=dtype) if exists else None
        vectors = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), (*shape, c.width), dtype) * c.width**-0.5)
        self.patch = PatchEmbedding(c, dtype=dtype, rngs=rngs)
        self.positions = nnx.Dict(table=vectors(c.side**2 + c.class_vector))
        self.start = nnx.Dict(vector=vectors()) if c.class_vector else None
        self.input_norm, self.output_norm = norm(c.input_norm), norm(c.output_norm)
        self.layers = nnx.List([TowerBlock(c, dtype=dtype, rngs=rngs) for _ in range(c.num_layers)])

    def __call__(self, pixels: Array, patches: Array) -> Array:
        """Return the vectors [S, D] of the patches of an image.

        Args:
          pixels: float[C, image_size, image_size].
          patches: bool[side, side], the patches that are not padding, in a rectangle that begins at the first one.
        """
        c, table = self.sizes, self.positions["table"][...]
        x = self.patch(pixels)
        place, visible = _places(patches, c.side), patches.reshape(-1)
        if self.start is not None:
            x = jnp.concatenate([self.start["vector"][...][None].astype(x.dtype), x])
            place = jnp.concatenate([jnp.zeros(1, place.dtype), place + 1])
            visible = jnp.concatenate([jnp.ones(1, bool), visible])
        x = x + table[place]
        x = x if self.input_norm is None else self.input_norm(x)

        # `jit` lets equal layers share one trace.
        @functools.partial(jax.jit, static_argnums=0)
        def run_layer(graphdef, state, x):
            return nnx.merge(graphdef, state)(x, visible)

        for block in self.layers:
            x = run_layer(*nnx.split(block), x)
        x = x if self.output_norm is None else self.output_norm(x)
        return x if self.start is None else x[1:]


def _places(patches: Array, side: int) -> Array:
    """Return the row int32[S] of the position table for each patch.

    The positions of a partial image are spread over the whole table. Padding has the first one.
    """
    table = jnp.asarray(_spread(side))
    rows, columns = table[jnp.sum(patches[:, 0])], table[jnp.sum(patches[0])]
    return jnp.where(patches, rows[:, None] * side + columns, 0).reshape(-1)


@functools.cache
def _spread(side: int) -> np.ndarray:
    """Return the position int32[side + 1, side] of each patch of a line with 0 ... `side` patches.

    Fractions are rounded like those of the published models, in float32.
    """
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    counts = np.maximum(np.arange(side + 1), 1).astype(np.float32)
    fractions = np.arange(side, dtype=np.float32) * (np.float32(1) / counts)[:, None]
    return np.searchsorted(bounds, np.minimum(fractions, np.float32(1 - 1e-6)), side="right").astype(np.int32)
