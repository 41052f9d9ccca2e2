"""Conditional execution inside a compiled program without a copy of the updated state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specjax.arrays import scopes

Array = jax.Array

State = TypeVar("State")
Result = TypeVar("Result")
Inputs = TypeVar("Inputs")


def narrow_or_wide(
    is_narrow: Array, narrow: Callable[[State], tuple[State, Result]], wide: Callable[[State], tuple[State, Result]],
    state: State,
) -> tuple[State, Result]:  # fmt: skip
    """Run `narrow(state)` if `is_narrow` bool[] is true, else `wide(state)`, and update `state` in place.

    The two passes are loops with one or zero iterations. XLA updates a loop's carry in place but copies the result of a
    branch. For 16 rows of SmolLM2 without a draft, a branch over the cache took 8 ms of 95 ms on two CPU cores.
    """
    narrow = jax.jit(narrow)  # traced once, for the shapes and for the loop
    _, result = narrow.eval_shape(state)
    carry = state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    times = is_narrow.astype(jnp.int32)
    with jax.named_scope(scopes.NARROW):
        carry = jax.lax.fori_loop(0, times, lambda _, carry: narrow(carry[0]), carry)
    with jax.named_scope(scopes.WIDE):
        return jax.lax.fori_loop(0, 1 - times, lambda _, carry: wide(carry[0]), carry)


def update_if(
    is_needed: Array, update: Callable[[Inputs, State], State], inputs: Inputs, state: State
) -> State:  # fmt: skip
    """Return `update(inputs, state)` if `is_needed` bool[] is true, else `state`, which is updated in place.

    inputs: small integer arrays. Every expensive operation of `update` must depend on them.

    The update is a loop with one or zero iterations, as in `narrow_or_wide`. XLA computes operations that are the same
    in all iterations in front of a loop, so a program would compute them in every step. The inputs therefore change
    from iteration to iteration.
    """

    def body(_: Array, carry: tuple[Inputs, State]) -> tuple[Inputs, State]:
        inputs, state = carry
        return jax.tree.map(lambda x: x + 1, inputs), update(inputs, state)

    return jax.lax.fori_loop(0, is_needed.astype(jnp.int32), body, (inputs, state))[1]
