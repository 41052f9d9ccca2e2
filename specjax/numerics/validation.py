"""Range checks of settings whose values are known. Traced values and None pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather


def check_integer(name: str, value: Any, minimum: int = 1) -> None:
    """Check that a value is an integer of at least `minimum`. None and traced values pass. Raises: UsageError."""
    predicate = lambda x: x.ndim == 0 and x.dtype.kind != "f" and x >= minimum
    check_range(name, value, predicate, f"a whole number of at least {minimum}")


def check_range(name: str, value: Any, predicate: Callable[[np.ndarray], np.ndarray], expected: str) -> None:
    """Check all elements of a value with `predicate`. None and traced values pass. Raises: UsageError that names
    `expected`.
    """
    if value is None or isinstance(value, jax.core.Tracer):
        return
    try:
        number = np.asarray(gather(value))
    except ValueError:  # rows of different lengths
        raise UsageError(f"{name} must be {expected}, not {value!r}") from None
    if number.size and (number.dtype.kind not in "iuf" or not np.all(predicate(number))):
        raise UsageError(f"{name} must be {expected}, not {value!r}")
