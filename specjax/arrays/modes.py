"""JAX modes of the library's programs: 32-bit types, standard promotion, and float32 products in float32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


FULL_PRECISION = "float32", "highest", "F32_F32_F32"
"""Values of `jax_default_matmul_precision` with which a product of float32 numbers has float32 accuracy."""


def matmul_precision() -> str:
    """Return the precision of float32 products in the library's programs: "highest", unless the caller has set one.

    By default, JAX multiplies float32 numbers in TF32 on GPUs, with a relative error of 3e-4, and in one bfloat16 pass
    on TPUs. Passes of two widths then give different tokens at gaps that float32 would not have. "highest" takes six
    bfloat16 passes on a TPU, and products without tensor cores on a GPU. It changes nothing on CPUs, nor for products
    of bfloat16. A caller who prefers speed sets `jax_default_matmul_precision`, for example to "default". The
    `precision` of a product inside a model also wins.
    """
    config: Any = jax.config  # its types lack this option
    return config.jax_default_matmul_precision or "highest"


def with_standard_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `function` with standard modes inside: 32-bit types, standard promotion, and `matmul_precision`.

    With `jax_enable_x64`, JAX promotes some indices and sums to 64 bits, and then the dtypes of a loop's carry no
    longer match. Under `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"`, the library and the
    models that it calls would not trace. The caller's own code keeps its modes. Arguments of float64, such as model
    parameters, are cast to float32.
    """

    @functools.wraps(function)
    def in_standard_modes(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with (
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            jax.default_matmul_precision(matmul_precision()),
        ):
            args, kwargs = _narrowed((args, kwargs))
            return function(*args, **kwargs)

    return in_standard_modes


def with_current_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `function` with the modes of this call, for a function that JAX traces again when it compiles."""
    config: Any = jax.config
    modes: list[tuple[Any, Any]] = [
        (jax.enable_x64, config.jax_enable_x64),
        (jax.numpy_dtype_promotion, config.jax_numpy_dtype_promotion),
        (jax.numpy_rank_promotion, config.jax_numpy_rank_promotion),
        (jax.default_matmul_precision, config.jax_default_matmul_precision),
    ]

    @functools.wraps(function)
    def in_modes(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with contextlib.ExitStack() as stack:
            for mode, value in modes:
                stack.enter_context(mode(value))
            return function(*args, **kwargs)

    return in_modes


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return `jax.jit(function, **options)`, traced in standard modes as by `with_standard_modes`.

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
