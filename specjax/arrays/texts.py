"""Passes over texts, whose tokens follow each other: masks and paths that are constants of a program.

They are NumPy arrays, so that a model can recognise them while it is traced, and compile a shorter form for texts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def causal_mask(batch: int, size: int) -> np.ndarray:
    """Return the mask bool[B, T, T] of a text of T tokens. Every token sees those before it and itself."""
    return np.broadcast_to(np.tril(np.ones((size, size), bool)), (batch, size, size))


def in_order(batch: int, size: int) -> np.ndarray:
    """Return the path int32[B, T] through all tokens of a text."""
    return np.broadcast_to(np.arange(size, dtype=np.int32), (batch, size))


def is_causal(mask: Any) -> bool:
    """Return True if `mask` [B, T, S] is a constant, and that of a text without earlier tokens."""
    return _is_constant(mask) and mask.shape[1] == mask.shape[2] and np.array_equal(mask, causal_mask(*mask.shape[:2]))


def is_in_order(path: Any) -> bool:
    """Return True if `path` [B, T] is a constant, and goes through all tokens in order."""
    return _is_constant(path) and np.array_equal(path, in_order(*path.shape))


def traced_mask(mask: Any) -> jax.Array:
    """Return a mask [B, T, S] as an array of the program. That of a text is computed, and no constant."""
    return jnp.broadcast_to(jnp.tril(jnp.ones(mask.shape[1:], bool)), mask.shape) if is_causal(mask) else mask


def _is_constant(x: Any) -> bool:
    return isinstance(x, np.ndarray)
