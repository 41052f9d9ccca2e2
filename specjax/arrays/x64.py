"""Protection of the library's programs from `jax_enable_x64`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_x64(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `function` with 64-bit mode switched off inside, so that its results are int32 and float32.

    With `jax_enable_x64`, JAX promotes some indices and sums to 64 bits, and then the dtypes of a loop's carry no
    longer match. The caller's own code stays in 64-bit mode. Arguments of float64, such as model parameters, are cast
    to float32.
    """

    @functools.wraps(function)
    def narrow(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.enable_x64(False):
            args, kwargs = _narrowed((args, kwargs))
            return function(*args, **kwargs)

    return narrow


def _narrowed(tree: Any) -> Any:
    is_wide = lambda x: getattr(x, "dtype", None) == np.float64
    if not any(map(is_wide, jax.tree.leaves(tree))):  # the usual case, which keeps the identity of the objects
        return tree
    return jax.tree.map(lambda x: x.astype(np.float32) if is_wide(x) else x, tree)
