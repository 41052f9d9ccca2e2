"""What a drafter hands on from one call, or one request, to the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.precision import in_32_bits
from specjax.types import Context, Drafter, PyTree, Target


def taught(drafter: Drafter, draft: PyTree) -> Drafter:
    """The drafter with what its state `draft` has to remember; as it is if it remembers nothing."""
    if drafter.remember is None:
        return drafter
    return drafter.replace(params=drafter.remember(drafter.params, draft))


teach = jax.jit(in_32_bits(taught))


@jax.jit
@in_32_bits
def settled(target: Target, drafter: Drafter) -> Drafter:
    """The drafter with parameters of the form that `remember` gives, and nothing added to what they say: those of a
    first call and of all that go on from it are then arguments of one program."""
    context = Context(jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), target=target)
    return taught(drafter, drafter.init(drafter.params, context))
