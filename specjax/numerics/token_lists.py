"""Token lists of different lengths as one padded array."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.validation import check_integer
from specjax.types import Array

UNIT = 32
"""Lengths of padded lists of several tokens are multiples of it, so that similar lengths share a program."""


def pad_token_lists(
    name: str, lists: Sequence[Sequence[int]], length: int | None = None, shortest: int = UNIT
) -> tuple[Array, Array]:
    """Return token lists as an array int32[B, W], and their lengths int32[B].

    Args:
      name: what the lists are, for errors.
      length: W. None: `shortest`, or else the smallest multiple of UNIT that has room for all lists.

    Raises: UsageError for no lists, and for a list that is empty, longer than `length` or no list of token ids.
    """
    try:
        rows = [np.asarray(tokens) for tokens in lists]
    except (TypeError, ValueError):  # a number, or lists in a list
        rows = []
    if not rows or not all(row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in rows):
        raise UsageError(f"{name} must be a list of token lists, each with at least one token; encode texts first")
    longest = max(map(len, rows))
    check_integer("length", length, longest)
    width = length or (shortest if longest <= shortest else -(-longest // UNIT) * UNIT)
    limited = [np.clip(row, -1, np.iinfo(np.int32).max) for row in rows]  # larger ids stay invalid
    padded = [np.pad(row, (0, width - len(row))) for row in limited]
    return jnp.asarray(np.stack(padded), jnp.int32), jnp.asarray([len(row) for row in rows], jnp.int32)
