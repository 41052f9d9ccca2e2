"""Running one of several functions inside a program without copying what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specjax.types import Array

State = TypeVar("State")
Result = TypeVar("Result")


def one_of_two(
    is_first: Array, first: Callable[[State], tuple[State, Result]], second: Callable[[State], tuple[State, Result]],
    state: State,
) -> tuple[State, Result]:  # fmt: skip
    """`first(state)` if `is_first` bool[], else `second(state)`, with `state` updated in place.

    As two loops of one turn or none, not as branches: what a loop carries is updated in place, what a branch returns is
    copied. Where nothing was drafted for 16 rows of SmolLM2 a branch of the cache took 8 ms of 95 on two cores.
    """
    first = jax.jit(first)  # traced once, for the shapes and for the loop
    _, result = first.eval_shape(state)
    carry = state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    times = is_first.astype(jnp.int32)
    carry = jax.lax.fori_loop(0, times, lambda _, carry: first(carry[0]), carry)
    return jax.lax.fori_loop(0, 1 - times, lambda _, carry: second(carry[0]), carry)
