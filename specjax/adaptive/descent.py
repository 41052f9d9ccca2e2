"""Adam on a loss of parameters, in one loop: what the trainers of this folder share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from specjax.types import Array, PyTree


def descend(loss: Callable[[PyTree], Array], params: PyTree, steps: int, learning_rate: float) -> tuple[PyTree, Array]:
    """The parameters after `steps`, and the loss before each: float32[steps]. Inside of `jit`."""
    optimizer = optax.adam(learning_rate)

    def step(carry, _):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), None, steps)
    return params, losses
