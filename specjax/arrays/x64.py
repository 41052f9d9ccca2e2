"""The width of numbers inside the library's programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_32_bits(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function` as it is without `jax_enable_x64`: what it makes is int32 and float32, as its contracts say.

    With that flag JAX's own functions give 64 bits where nothing else is asked for, here an index, there a sum, and no
    two parts of a loop's state agree. In a program of the caller's own everything else keeps its 64 bits. Arguments of
    float64, such as a model's parameters, are float32 inside.
    """

    @functools.wraps(function)
    def narrow(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.enable_x64(False):
            args, kwargs = _narrowed((args, kwargs))
            return function(*args, **kwargs)

    return narrow


def _narrowed(tree: Any) -> Any:
    is_wide = lambda x: getattr(x, "dtype", None) == np.float64
    if not any(map(is_wide, jax.tree.leaves(tree))):  # mostly: and then the objects stay what they are
        return tree
    return jax.tree.map(lambda x: x.astype(np.float32) if is_wide(x) else x, tree)
