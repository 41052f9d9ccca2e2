"""Padding of the rows of a product to a full tile of a TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Array

TILE_ROWS = 8


def pad_tokens(x: Array) -> Array | None:
    """Pad the tokens of x [..., T, I] or [I], so that a device has at least 8 rows; None if it has them.

    The compiler for TPUs uses no matrix unit for fewer rows. Batch rows are not padded, because the batch may be
    sharded over devices. Returns: [..., T', I] or [T', I].
    """
    tokens = x.shape[-2] if x.ndim > 1 else 1
    batch = x.size // (x.shape[-1] * tokens * num_batch_shards())
    min_tokens = -(-TILE_ROWS // max(batch, 1))
    if tokens >= min_tokens:
        return None
    rows = x.reshape(*x.shape[:-2], tokens, x.shape[-1])
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, min_tokens - tokens), (0, 0)])


def unpad_tokens(y: Array, shape: tuple[int, ...]) -> Array:
    """Return the outputs [*shape[:-1], O] of the rows of an array of `shape`, from those of its padded rows."""
    return y[..., : shape[-2] if len(shape) > 1 else 1, :].reshape(*shape[:-1], -1)


def num_batch_shards() -> int:
    """Return the number of devices that split the batch in the program being traced; 1 if arrays are local."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else dict(mesh.shape).get("data", 1)
