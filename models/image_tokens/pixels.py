"""Pixels of the codes of Janus, by the decoder of its VQ model.

Codes become unit vectors of the codebook. Convolutions, two kinds of residual blocks and upsampling turn their grid
into an image. Everything runs in float32. The arrays of a checkpoint are the parameters, under their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.validation import check_integer
from specjax.types import Array

GROUPS, EPS = 32, 1e-6
"""Groups of channels of a norm, and what it adds to the variance."""
CODEBOOK = "quantize.embedding.weight"


def janus_pixels(tensors: Mapping[str, Any], codes: Any, *, columns: int | None = None) -> Array:
    """Return the images float32[B, H, W, 3] of codes, with values of about -1 to 1.

        tensors = safetensors.flax.load_file("model.safetensors")
        pixels = janus_pixels(tensors, codes)

    Args:
      tensors: arrays of a Janus checkpoint by name. Other tensors than those of the VQ model may be among them.
      codes: int[B, N], from 0, row by row.
      columns: codes in a row. None: the grid is square.

    Raises: UsageError for tensors without a complete VQ model, and for codes that form no grid.
    """
    prefix = next((name.removesuffix(CODEBOOK) for name in tensors if name.endswith(CODEBOOK)), None)
    if prefix is None:
        raise UsageError(f"{CODEBOOK} is not in the checkpoint; give the tensors of a Janus model")
    parts = tuple(prefix + part for part in ("quantize.", "post_quant_conv.", "decoder."))
    weights = {name.removeprefix(prefix): jnp.asarray(x) for name, x in tensors.items() if name.startswith(parts)}
    check_integer("columns", columns)
    try:
        grid = np.asarray(codes)
    except ValueError:  # lists of different lengths
        grid = np.zeros(0)
    if grid.size and grid.dtype.kind not in "iu":
        raise UsageError(f"codes must be whole numbers, not {grid.dtype}; give the codes of images")
    width = columns or math.isqrt(grid.shape[-1] if grid.ndim else 0)
    if grid.ndim != 2 or not width or grid.shape[1] % width or (columns is None and width * width != grid.shape[1]):
        raise UsageError(f"codes must be [images, rows x columns], not {list(grid.shape)} with {width} columns")
    if grid.size and not 0 <= grid.min() <= grid.max() < len(weights[CODEBOOK]):
        raise UsageError(f"codes must be from 0 to {len(weights[CODEBOOK]) - 1}; subtract the first token of the codes")
    try:
        return _pixels(weights, jnp.asarray(grid.reshape(len(grid), -1, width)))
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is not in the checkpoint; give the tensors of all its files") from None


@jax.jit
def _pixels(weights: Mapping[str, Array], codes: Array) -> Array:
    weights = {name: x.astype(jnp.float32) for name, x in weights.items()}
    vectors = weights[CODEBOOK][codes]
    vectors = vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    x = _convolve(weights, "post_quant_conv", vectors.transpose(0, 3, 1, 2))
    x = _convolve(weights, "decoder.conv_in", x)
    x = _residual(weights, "decoder.mid.block_1", x)
    x = _attend(weights, "decoder.mid.attn_1", x)
    x = _residual(weights, "decoder.mid.block_2", x)
    for level in range(_count(weights, "decoder.up.")):
        name = f"decoder.up.{level}."
        for block in range(_count(weights, f"{name}block.")):
            x = _residual(weights, f"{name}block.{block}", x)
            if f"{name}attn.{block}.norm.weight" in weights:
                x = _attend(weights, f"{name}attn.{block}", x)
        if f"{name}upsample.conv.weight" in weights:
            x = _convolve(weights, f"{name}upsample.conv", x.repeat(2, 2).repeat(2, 3))
    x = _convolve(weights, "decoder.conv_out", jax.nn.silu(_normalize(weights, "decoder.norm_out", x)))
    return x.transpose(0, 2, 3, 1)


def _count(weights: Mapping[str, Array], prefix: str) -> int:
    """Return how many numbered modules have names with this prefix."""
    return len({name.removeprefix(prefix).split(".")[0] for name in weights if name.startswith(prefix)})


def _convolve(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Convolve x [B, C, H, W] and keep its height and width."""
    kernel = weights[f"{name}.weight"]
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", precision="highest")
    return y + weights[f"{name}.bias"][:, None, None]


def _normalize(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Normalise groups of channels of x [B, C, H, W]."""
    groups = x.reshape(len(x), GROUPS, -1)
    centred = groups - groups.mean(-1, keepdims=True)
    y = (centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + EPS)).reshape(x.shape)
    return y * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]


def _residual(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Add two convolutions to x, which a narrow one maps to other channels if their number differs."""
    y = _convolve(weights, f"{name}.conv1", jax.nn.silu(_normalize(weights, f"{name}.norm1", x)))
    y = _convolve(weights, f"{name}.conv2", jax.nn.silu(_normalize(weights, f"{name}.norm2", y)))
    shortcut = f"{name}.nin_shortcut"
    return y + (_convolve(weights, shortcut, x) if f"{shortcut}.weight" in weights else x)


def _attend(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Add attention over all places of x [B, C, H, W] with one head."""
    y = _normalize(weights, f"{name}.norm", x)
    q, k, v = (_convolve(weights, f"{name}.{part}", y).reshape(*x.shape[:2], -1) for part in "qkv")
    scores = jnp.einsum("bcq,bck->bqk", q, k, precision="highest") * x.shape[1] ** -0.5
    y = jnp.einsum("bqk,bck->bcq", jax.nn.softmax(scores, -1), v, precision="highest").reshape(x.shape)
    return x + _convolve(weights, f"{name}.proj_out", y)
