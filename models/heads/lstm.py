"""An LSTM, its gates in the order of PyTorch's.

[i; f; g; o] = W x + U h; c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c').
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.types import Array


class Cell(nnx.Module):
    """One layer."""

    def __init__(self, fan_in: int, width: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        self.inputs = L.Linear(fan_in, 4 * width, bias=bias, dtype=dtype, rngs=rngs)
        self.states = L.Linear(width, 4 * width, bias=bias, dtype=dtype, rngs=rngs)

    def carried(self, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        """(h, c) [.., T, D] after each of x [.., T, D'], one after another from h, c [.., D]."""

        def step(before: tuple[Array, Array], driven: Array):
            after = _gated(driven + self.states(before[0]), before[1])
            return after, after

        h, c = jax.lax.scan(step, (h, c), jnp.moveaxis(self.inputs(x), -2, 0))[1]
        return jnp.moveaxis(h, 0, -2), jnp.moveaxis(c, 0, -2)

    def alone(self, x: Array) -> Array:
        """h [.., T, D] after each of x [.., T, D'], from zeros."""
        bias = self.states.bias
        driven = self.inputs(x) if bias is None else self.inputs(x) + bias[...]
        return _gated(driven, jnp.zeros((), driven.dtype))[0]


def _gated(driven: Array, c: Array) -> tuple[Array, Array]:
    """(h', c') [.., D] of W x + U h [.., 4 D]."""
    i, f, g, o = jnp.split(driven, 4, -1)
    c = nnx.sigmoid(f) * c + nnx.sigmoid(i) * jnp.tanh(g)
    return nnx.sigmoid(o) * jnp.tanh(c), c


class LSTM(nnx.Module):
    """Several layers, one upon another. carries: else each input is read for itself, from zeros."""

    def __init__(self, fan_in: int, width: int, layers: int, *, carries: bool, bias: bool, dtype, rngs: nnx.Rngs):
        cell = lambda i: Cell(width if i else fan_in, width, bias=bias, dtype=dtype, rngs=rngs)
        self.cells, self.carries = nnx.List([cell(i) for i in range(layers)]), carries

    def __call__(self, x: Array, state: Array) -> tuple[Array, Array]:
        """(what the last layer says [.., T, D], the states [.., T, S, D] after each) of x [.., T, D'].

        state: [.., S, D] before the first: h and c of each layer; without any, S = 0, unless it carries them.
        """
        if not self.carries:
            for cell in self.cells:
                x = cell.alone(x)
            return x, jnp.zeros((*x.shape[:-1], *state.shape[-2:]), x.dtype)
        after = []
        for i, cell in enumerate(self.cells):
            x, c = cell.carried(x, state[..., 2 * i, :], state[..., 2 * i + 1, :])
            after += [x, c]
        return x, jnp.stack(after, -2)
