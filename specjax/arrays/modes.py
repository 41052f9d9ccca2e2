"""Protection of the library's programs from the caller's JAX modes: 64-bit types and strict promotion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def with_standard_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `function` with JAX's default modes inside: 32-bit types, and standard promotion of dtypes and ranks.

    With `jax_enable_x64`, JAX promotes some indices and sums to 64 bits, and then the dtypes of a loop's carry no
    longer match. Under `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"`, the library and the
    models that it calls would not trace. The caller's own code keeps its modes. Arguments of float64, such as model
    parameters, are cast to float32.
    """

    @functools.wraps(function)
    def in_standard_modes(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            args, kwargs = _narrowed((args, kwargs))
            return function(*args, **kwargs)

    return in_standard_modes


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return `jax.jit(function, **options)`, traced in JAX's default modes as by `with_standard_modes`.

    Without a function, return a decorator: `@jit(static_argnames="count")`.
    """
    if function is None:
        return functools.partial(jit, **options)
    return jax.jit(with_standard_modes(function), **options)


def _narrowed(tree: Any) -> Any:
    is_wide = lambda x: getattr(x, "dtype", None) == np.float64
    if not any(map(is_wide, jax.tree.leaves(tree))):  # the usual case, which keeps the identity of the objects
        return tree
    return jax.tree.map(lambda x: x.astype(np.float32) if is_wide(x) else x, tree)
