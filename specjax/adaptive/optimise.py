"""Code shared by the trainers of adaptive depth: one pass over full texts, and an Adam loop."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from specjax.models.variants.expanding import check_trainable
from specjax.numerics.validation import check_integer
from specjax.types import Array, Model, Output, PyTree


def descend(
    loss: Callable[..., Array], params: PyTree, steps: int, learning_rate: float | optax.GradientTransformation,
    key: Array | None = None,
) -> tuple[PyTree, Array]:  # fmt: skip
    """Minimise a loss, and return (parameters after `steps`, float32[steps] losses before each step).

    Call it inside `jit`. Parameters of 16 bits have a float32 copy that the optimizer updates, because most updates are
    too small for 16 bits. The loss reads them in their own dtype.

    Args:
      learning_rate: Adam's learning rate, or another optimizer.
      key: if not None, the second argument of the loss is a key that differs in each step.

    Raises: UsageError for a negative number of steps, or for quantised parameters.
    """
    check_integer("steps", steps, 0)
    check_trainable(params, "the model to train")
    optimizer = learning_rate if isinstance(learning_rate, optax.GradientTransformation) else optax.adam(learning_rate)

    dtypes = jax.tree.map(lambda x: x.dtype, params)
    own_dtypes = lambda copy: jax.tree.map(lambda x, dtype: x.astype(dtype), copy, dtypes)
    copy = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize == 2 else x, params)

    def step(carry, number):
        copy, state = carry
        step_key = () if key is None else (jax.random.fold_in(key, number),)
        value, gradient = jax.value_and_grad(lambda copy: loss(own_dtypes(copy), *step_key))(copy)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(copy, updates), state), value

    (copy, _), losses = jax.lax.scan(step, (copy, optimizer.init(copy)), jnp.arange(steps))
    return own_dtypes(copy), losses


def one_pass(
    model: Model, params: PyTree, tokens: Array, cache: PyTree, taps: tuple[int, ...] = (), **more
) -> tuple[Output, PyTree]:
    """Run `Model.forward` over full texts `tokens` int32[B, T]. more: additional arguments of it."""
    batch, size = tokens.shape
    return model.forward(
        params, tokens, cache, positions=jnp.broadcast_to(jnp.arange(size), (batch, size)),
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size)), taps=taps, **more,
    )  # fmt: skip
