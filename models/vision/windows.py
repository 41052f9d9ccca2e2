"""Attention in square windows of an image (Qwen2.5-VL, arXiv 2502.13923).

The patches are in the order of their windows. A window then lies within two neighbouring chunks of its size. So chunks
attend to themselves and their neighbours, whatever the size of the image, and all shapes are static.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.pallas_kernels.tree_attention.reference import NEG
from specjax.types import Array

PADDING = np.iinfo(np.int32).max
"""The window of patches without an image, which are the last ones."""


def sort_by_window(rows: Array, columns: Array, visible: Array, width: Array, size: int) -> tuple[Array, Array]:
    """Return the patches int32[S] of an image in the order of their windows, and the window int32[S] of each of them.

    Args:
      rows: int32[S], and `columns` too, the places of the patches.
      visible: bool[S], the patches that are not padding.
      width: int32[], the number of patches in a row of the image.
      size: patches in a row of a window. Windows at the right and lower edges may be smaller.
    """
    per_row = -(-width // size)
    window = jnp.where(visible, rows // size * per_row + columns // size, PADDING)
    order = jnp.argsort(window, stable=True)  # a block of merged patches stays together
    return order, window[order]


def undo_order(x: Array, order: Array) -> Array:
    """Return the vectors [S, D] of patches in the order that they had before `sort_by_window`."""
    return jnp.zeros_like(x).at[order].set(x, unique_indices=True)


def attend_in_windows(q: Array, k: Array, v: Array, windows: Array, size: int) -> Array:
    """Return the attention [S, H, h] of queries to the keys and values [S, H, h] of the same window.

    Args:
      windows: int32[S] in ascending order.
      size: the largest number of patches of a window.
    """
    count = len(q)
    chunk = next(n for n in range(min(size, count), count + 1) if count % n == 0)
    split = lambda x: x.reshape(-1, chunk, *x.shape[1:])

    def neighbours(x: Array, fill: int) -> Array:
        edge = jnp.full_like(x[:chunk], fill)
        left, right = jnp.concatenate([edge, x[:-chunk]]), jnp.concatenate([x[chunk:], edge])
        return jnp.concatenate([split(left), split(x), split(right)], 1)

    scores = jnp.einsum("cthd,cshd->chts", split(q), neighbours(k, 0), preferred_element_type=jnp.float32)
    is_visible = split(windows)[:, None, :, None] == neighbours(windows, -1)[:, None, None]
    weights = jax.nn.softmax(jnp.where(is_visible, scores * q.shape[-1] ** -0.5, NEG), -1)
    return jnp.einsum("chts,cshd->cthd", weights.astype(v.dtype), neighbours(v, 0)).reshape(q.shape)
