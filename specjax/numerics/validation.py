"""Checks of settings with concrete values, of token lists, and of states that a loop carries. All raise UsageError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather

MAX_NODES = 4096
"""Maximum number of drafted tokens in a pass. All of them are allocated before drafting."""


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> None:
    """Check that a value is an integer from `minimum` to `maximum`. None and traced values pass. Raises: UsageError."""
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    largest = np.inf if maximum is None else maximum
    predicate = lambda x: x.ndim == 0 and x.dtype.kind != "f" and minimum <= x <= largest
    check_range(name, value, predicate, f"a whole number {limits}")


def check_range(name: str, value: Any, predicate: Callable[[np.ndarray], np.ndarray], expected: str) -> None:
    """Check all elements of a value with `predicate`. None and traced values pass.

    Raises: UsageError that names `expected`.
    """
    if value is None or isinstance(value, jax.core.Tracer):
        return
    try:
        number = np.asarray(gather(value))
    except ValueError:  # rows of different lengths
        raise UsageError(f"{name} must be {expected}, not {value!r}") from None
    if number.size and (number.dtype.kind not in "iuf" or not np.all(predicate(number))):
        raise UsageError(f"{name} must be {expected}, not {value!r}")


def check_same(item: str, expected: Any, value: Any) -> None:
    """Check that a state that a loop carries keeps its structure, shapes and dtypes.

    Raises: UsageError that names `item` and the first difference.
    """
    old, new = str(jax.tree.structure(expected)), str(jax.tree.structure(value))
    if old != new:
        raise UsageError(f"{item} must return its state in the same form: {old}, not {new}")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(value), strict=True):
        if form_of(x) != form_of(y):
            place = jax.tree_util.keystr(path) or "its state"
            raise UsageError(f"{item} must return {place} in the same form: {form_of(x)}, not {form_of(y)}")


def form_of(x: Any) -> str:
    """Return the dtype and the shape of an array, such as float32[2, 3]."""
    return f"{x.dtype if hasattr(x, 'dtype') else jnp.result_type(x)}{list(jnp.shape(x))}"


def name_of(function: Callable) -> str:
    """Return the module and the name of a function, so that a reader of an error can find it."""
    function = getattr(function, "func", function)  # the function of a partial
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def pad_rows(rows: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return rows of integers as int32[B, size], padded on the right. Ids beyond 32 bits become invalid ones."""
    padded = np.zeros((len(rows), size), np.int32)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = np.clip(row, -1, np.iinfo(np.int32).max)
    return padded


TOKENS = 32
"""Lengths of padded token lists are multiples of it, so that similar lengths share a program."""


def pad_token_lists(
    name: str, lists: Sequence[Sequence[int]], length: int | None = None, shortest: int = TOKENS
) -> tuple[jax.Array, jax.Array]:
    """Return token lists as an array int32[B, W], and their lengths int32[B].

    Args:
      name: what the lists are, for errors.
      length: W. None: `shortest`, or else the smallest multiple of TOKENS that has room for all lists.

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
    width = length or (shortest if longest <= shortest else -(-longest // TOKENS) * TOKENS)
    return jnp.asarray(pad_rows(rows, width)), jnp.asarray([len(row) for row in rows], jnp.int32)
