"""Padding of the rows of a product to a full tile of a TPU, whose compiler uses no matrix unit for fewer rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Array

TILE_ROWS = 8


def fill_tile(x: Array) -> Array:
    """Append tokens of zeros to x [..., T, D], so that every device has a tile of at least 8 rows.

    The batch may be sharded over devices. Therefore the tokens are padded, and not the rows of the batch.
    """
    tokens, width = x.shape[-2:]
    batch = x.size // (width * tokens * num_batch_shards())
    return pad_tokens(x, max(tokens, -(-TILE_ROWS // max(batch, 1))))


def pad_tokens(x: Array, count: int) -> Array:
    """Append tokens of zeros to x [..., T, D], up to `count` tokens."""
    padding = count - x.shape[-2]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)]) if padding else x


def num_batch_shards() -> int:
    """Return the number of devices that split the batch in the program being traced; 1 if arrays are local."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else dict(mesh.shape).get("data", 1)
