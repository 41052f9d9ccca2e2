"""Linear functions that bring their transposes, for loops that JAX cannot transpose.

A rule of `jax.custom_jvp` that calls `apply_linear` has forward-mode and reverse-mode derivatives. A function with
`jax.custom_vjp` has no forward-mode ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from specjax.arrays.modes import with_current_modes

Array = jax.Array
FlatFunction = Callable[[Any, Any], list[Array]]
"""Function from the leaves of residuals and inputs to those of outputs."""


def apply_linear(
    function: Callable[[Any, Any], Any],
    transpose: Callable[[Any, Any], Any],
    residuals: Any,
    inputs: Any,
) -> Any:
    """Return `function(residuals, inputs)`, whose transpose JAX does not derive but takes from the caller.

    Args:
      function: linear in the inputs, which are floats.
      transpose: from the residuals and the cotangents of the outputs to the cotangents of the inputs.
    """
    unflatten = jax.tree.unflatten
    arrays = lambda values: [jnp.asarray(value) for value in values]  # JAX hands over constants as arrays of NumPy
    constants, residual_tree = jax.tree.flatten(residuals)
    linear, linear_tree = jax.tree.flatten(inputs)
    outputs = jax.eval_shape(function, residuals, inputs)
    flat_outputs, output_tree = jax.tree.flatten(outputs)

    def forward(residuals: Any, linear: Any) -> list[Array]:
        return jax.tree.leaves(
            function(unflatten(residual_tree, arrays(residuals)), unflatten(linear_tree, arrays(linear)))
        )

    def backward(residuals: Any, cotangents: Any) -> list[Array]:
        return jax.tree.leaves(
            transpose(unflatten(residual_tree, arrays(residuals)), unflatten(output_tree, arrays(cotangents)))
        )

    # JAX traces both again when it compiles, outside of the modes of the caller.
    result = _linear_map.bind(
        *map(jnp.asarray, constants), *linear, forward=with_current_modes(forward),
        backward=with_current_modes(backward), num_residuals=len(constants), outputs=tuple(flat_outputs),
    )  # fmt: skip
    return unflatten(output_tree, result)


_linear_map = Primitive("linear_map")
_linear_map.multiple_results = True


def _evaluate(*values: Array, forward: FlatFunction, backward: FlatFunction, num_residuals: int, outputs: tuple):
    return forward(values[:num_residuals], values[num_residuals:])


def _abstract(*values: Any, forward: FlatFunction, backward: FlatFunction, num_residuals: int, outputs: tuple) -> list:
    return [jax.core.ShapedArray(output.shape, output.dtype) for output in outputs]


def _derivative(primals: tuple, tangents: tuple, **params: Any) -> tuple[list, list]:
    """Return the outputs and their tangents. Those of the residuals need forward-mode derivatives of the function."""
    count, forward = params["num_residuals"], params["forward"]
    residuals, linear = primals[:count], primals[count:]
    is_zero = [type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0 for tangent in tangents]
    parts = []
    if not all(is_zero[count:]):
        filled = [ad.instantiate_zeros(tangent) for tangent in tangents[count:]]
        parts.append(_linear_map.bind(*residuals, *filled, **params))
    changing = [place for place in range(count) if not is_zero[place]]
    if changing:

        def of_changing(*values: Array) -> list[Array]:
            new = dict(zip(changing, values, strict=True))
            return forward([new.get(place, value) for place, value in enumerate(residuals)], linear)

        parts.append(jax.jvp(of_changing, [residuals[i] for i in changing], [tangents[i] for i in changing])[1])
    outputs = _linear_map.bind(*primals, **params)
    return outputs, [functools.reduce(jnp.add, terms) for terms in zip(*parts, strict=True)]


def _transpose(cotangents: list, *values: Any, forward, backward, num_residuals: int, outputs: tuple) -> list:
    residuals, linear = values[:num_residuals], values[num_residuals:]
    filled = [
        jnp.zeros(output.shape, output.dtype) if type(cotangent) is ad.Zero else cotangent
        for cotangent, output in zip(cotangents, outputs, strict=True)
    ]
    shape_of = lambda value: value.aval if ad.is_undefined_primal(value) else value
    inputs = tuple(jax.ShapeDtypeStruct(shape_of(value).shape, shape_of(value).dtype) for value in linear)
    results = _linear_map.bind(
        *residuals, *filled, forward=backward, backward=forward, num_residuals=num_residuals, outputs=inputs
    )  # fmt: skip
    wanted = [result if ad.is_undefined_primal(value) else None for result, value in zip(results, linear, strict=True)]
    return [None] * num_residuals + wanted


def _batch(values: tuple, axes: tuple, *, forward, backward, num_residuals: int, outputs: tuple) -> tuple[list, list]:
    """Return the outputs of a batch. Each linear input gets the batch axis, so that each cotangent has it too."""
    is_batched = lambda axis: axis is not None
    size = next(value.shape[axis] for value, axis in zip(values, axes, strict=True) if is_batched(axis))
    linear = [
        jnp.moveaxis(value, axis, 0) if is_batched(axis) else jnp.broadcast_to(value, (size, *value.shape))
        for value, axis in zip(values[num_residuals:], axes[num_residuals:], strict=True)
    ]
    of_residuals = tuple(axis if is_batched(axis) else None for axis in axes[:num_residuals])
    over = functools.partial(jax.vmap, in_axes=(of_residuals, 0), axis_size=size)
    in_rows = lambda function: lambda residuals, linear: over(function)(tuple(residuals), tuple(linear))
    results = _linear_map.bind(
        *values[:num_residuals], *linear, forward=in_rows(forward), backward=in_rows(backward),
        num_residuals=num_residuals,
        outputs=tuple(jax.ShapeDtypeStruct((size, *output.shape), output.dtype) for output in outputs),
    )  # fmt: skip
    return results, [0] * len(results)


_linear_map.def_impl(_evaluate)
_linear_map.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear_map] = _derivative
ad.primitive_transposes[_linear_map] = _transpose
batching.primitive_batchers[_linear_map] = _batch
mlir.register_lowering(_linear_map, mlir.lower_fun(_evaluate, multiple_results=True))
