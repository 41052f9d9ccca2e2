"""Images whose vectors see each other: masks, and chunks of a text that cut an image in two.

The vectors of an image are known before the text is read. So a chunk that ends within an image reads the rest of the
image too, and drops the results of these vectors. The keys, values and states of the chunk are then those of a pass
over the complete text, wherever its borders are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays import texts
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models.vision.memory import ImageMemory
from specjax.types import Array, Output, Stream

UNUSED_LOGITS: Any = None
"""Both branches leave logits out, because those of the rest would be one of the largest arrays of a prefill."""


def with_images(mask: Array, positions: Array, keys: Array, memory: ImageMemory, count: int) -> Array:
    """Return a mask in which the vectors of an image also see its later ones.

    Args:
      mask: bool[B, T, M]. positions: int32[B, T]. keys: int32[B, M], the positions of the keys.
      count: the vectors of each image.
    """
    queries, images = (_image_at(memory, places, count) for places in (positions, keys))
    is_one_image = (queries[:, :, None] == images[:, None]) & (queries[:, :, None] >= 0)
    # Earlier vectors are in the mask. Equal positions are other nodes of a tree.
    is_later = keys[:, None] > positions[:, :, None]
    return texts.traced_mask(mask) | (is_one_image & is_later)


def _image_at(memory: ImageMemory, positions: Array, count: int) -> Array:
    """Return the image int32[B, T] at positions int32[B, T], or -1."""
    index, has_vector = memory.find(positions)
    return jnp.where(has_vector, index // count, -1)


def look_ahead(
    run: Callable[..., tuple[Output, kv.Pending]], x: Array, positions: Array, mask: Array, memory: ImageMemory,
    count: int,
) -> tuple[Output, kv.Pending]:  # fmt: skip
    """Run a chunk of a text, together with the rest of an image that it cuts in two.

    Args:
      run: `(tokens, *, positions, mask) -> (output, pending)`, a pass of the text model.
      x: [B, T, D], the inputs of the chunk. positions: int32[B, T]. mask: bool[B, T, T], that of `with_images`.
      count: the vectors of each image.

    Returns: the output without logits, and the pending entries, both of the chunk alone.
    """
    size = x.shape[1]
    index, has_vector = memory.find(positions[:, -1:])
    ahead = index + 1 + jnp.arange(count - 1)
    is_rest = has_vector & (ahead // count == index // count)

    def run_chunk() -> tuple[Output, kv.Pending]:
        output, pending = run(Stream(x), positions=positions, mask=mask)
        return output._replace(logits=UNUSED_LOGITS), pending

    def run_with_rest() -> tuple[Output, kv.Pending]:
        vectors = take_along(memory.vectors, jnp.where(is_rest, ahead, 0)[..., None], 1)
        is_cut = _image_at(memory, positions, count) == index // count
        sees_rest = (is_cut & has_vector)[..., None] & is_rest[:, None]
        rows = jnp.concatenate([mask, sees_rest], 2)
        rest_rows = jnp.broadcast_to(is_rest[:, None], (*is_rest.shape, count - 1))
        rest_rows = jnp.concatenate([jnp.ones((*is_rest.shape, size), bool), rest_rows], 2)
        output, pending = run(
            Stream(jnp.concatenate([x, vectors.astype(x.dtype)], 1)),
            positions=jnp.concatenate([positions, positions[:, -1:] + 1 + jnp.arange(count - 1)], 1),
            mask=jnp.concatenate([rows, rest_rows], 1),
        )
        output = jax.tree.map(lambda part: part[:, :size], output._replace(logits=UNUSED_LOGITS))
        return output, kv.truncate_pending(pending, size)

    return jax.lax.cond(jnp.any(is_rest), run_with_rest, run_chunk)
