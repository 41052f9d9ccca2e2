"""An LSTM with the gate order of PyTorch.

[i; f; g; o] = W x + U h; c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c').
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.types import Array


class LSTMCell(nnx.Module):
    """A layer of an LSTM."""

    def __init__(self, fan_in: int, width: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        self.inputs = L.Linear(fan_in, 4 * width, bias=bias, dtype=dtype, rngs=rngs)
        self.states = L.Linear(width, 4 * width, bias=bias, dtype=dtype, rngs=rngs)

    def scan(self, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        """Return h and c [.., T, D] after each input of x [.., T, D'], starting from h, c [.., D]."""

        def step(state: tuple[Array, Array], gates: Array):
            state = _update(gates + self.states(state[0]), state[1])
            return state, state

        h, c = jax.lax.scan(step, (h, c), jnp.moveaxis(self.inputs(x), -2, 0))[1]
        return jnp.moveaxis(h, 0, -2), jnp.moveaxis(c, 0, -2)

    def apply(self, x: Array) -> Array:
        """Return h [.., T, D] after each input of x [.., T, D'] alone, starting from zeros."""
        bias = self.states.bias
        gates = self.inputs(x) if bias is None else self.inputs(x) + bias[...]
        return _update(gates, jnp.zeros((), gates.dtype))[0]


def _update(gates: Array, c: Array) -> tuple[Array, Array]:
    """Return h' and c' [.., D] from the gates W x + U h [.., 4 D]."""
    i, f, g, o = jnp.split(gates, 4, -1)
    c = nnx.sigmoid(f) * c + nnx.sigmoid(i) * jnp.tanh(g)
    return nnx.sigmoid(o) * jnp.tanh(c), c


class LSTM(nnx.Module):
    """A stack of LSTM layers. carries: True: they carry a state along the text; False: they read each input alone."""

    def __init__(self, fan_in: int, width: int, layers: int, *, carries: bool, bias: bool, dtype, rngs: nnx.Rngs):
        cell = lambda i: LSTMCell(width if i else fan_in, width, bias=bias, dtype=dtype, rngs=rngs)
        self.cells, self.carries = nnx.List([cell(i) for i in range(layers)]), carries

    def __call__(self, x: Array, state: Array) -> tuple[Array, Array]:
        """Return the last layer's outputs [.., T, D] and the states [.., T, S, D] after each input of x [.., T, D'].

        state: [.., S, D], h and c of each layer before the first input. S is 0 for layers that carry no state.
        """
        if not self.carries:
            for cell in self.cells:
                x = cell.apply(x)
            return x, jnp.zeros((*x.shape[:-1], *state.shape[-2:]), x.dtype)
        states: list[Array] = []
        for i, cell in enumerate(self.cells):
            x, c = cell.scan(x, state[..., 2 * i, :], state[..., 2 * i + 1, :])
            states += [x, c]
        return x, jnp.stack(states, -2)
