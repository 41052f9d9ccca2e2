"""Whether a setting lies in its range, where its value is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.numerics.global_arrays import gather


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises: UsageError for what is no whole number, or is below `least`; None and what is traced pass."""
    holds = lambda x: x.ndim == 0 and x.dtype.kind != "f" and x >= least
    check_range(name, value, holds, f"a whole number of at least {least}")


def check_range(name: str, value: Any, holds: Callable[[np.ndarray], np.ndarray], wanted: str) -> None:
    """Raises: UsageError for a value that is not `wanted`; None and what is traced pass."""
    if value is None or isinstance(value, jax.core.Tracer):
        return
    try:
        number = np.asarray(gather(value))
    except ValueError:  # rows of different lengths
        raise UsageError(f"{name} must be {wanted}, not {value!r}") from None
    if number.size and (number.dtype.kind not in "iuf" or not np.all(holds(number))):
        raise UsageError(f"{name} must be {wanted}, not {value!r}")
