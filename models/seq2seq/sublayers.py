"""Sublayers of an encoder-decoder: attention over a fixed set of keys, and MLPs without a gate."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.seq2seq.config import Seq2SeqConfig
from specjax.pallas_kernels.tree_attention.reference import NEG
from specjax.types import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


def activation(c: Seq2SeqConfig) -> Callable[[Array], Array]:
    """Return the activation function of the MLPs."""
    return ACTIVATIONS[c.feed_activation]


class PlainMLP(nnx.Module):
    """Feed-forward block without a gate: down(act(up(x)))."""

    def __init__(self, c: Seq2SeqConfig, hidden: int, rngs: nnx.Rngs, *, bias: bool = False):
        self.up = L.Linear(c.width, hidden, bias=bias, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(hidden, c.width, bias=bias, dtype=c.dtype, rngs=rngs)
        self.act = activation(c)

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


class SourceAttention(nnx.Module):
    """Attention over the tokens of a source, which all queries see."""

    def __init__(
        self, c: Seq2SeqConfig, heads: int, head_dim: int, rngs: nnx.Rngs,
        *, scale: float = 1.0, bias: bool = False, key_bias: bool = False,
    ):  # fmt: skip
        """Create the projections. `scale` multiplies the scores."""
        linear = functools.partial(L.Linear, dtype=c.dtype, rngs=rngs)
        inner = heads * head_dim
        self.q, self.v = (linear(c.width, inner, bias=bias) for _ in range(2))
        self.k = linear(c.width, inner, bias=key_bias)
        self.o = linear(inner, c.width, bias=bias)
        self.head_dim, self.scale = head_dim, scale

    def keys_and_values(self, source: Array) -> tuple[Array, Array]:
        """Return the keys and values [B, H, S, h] of a source [B, S, D]."""
        by_head = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim).swapaxes(1, 2)
        return by_head(self.k(source)), by_head(self.v(source))

    def __call__(self, x: Array, keys: Array, values: Array, length: Array, bias: Array | None = None) -> Array:
        """Attend from x [B, T, D] to the first `length` int32[B] of S keys and values [B, H, S, h].

        bias: float[H, T, S], added to the scores; None: nothing.
        """
        q = self.q(x)
        q = q.reshape(*q.shape[:2], -1, self.head_dim)
        scores = jnp.einsum("bthd,bhsd->bhts", q, keys, preferred_element_type=jnp.float32)
        scores = scores if self.scale == 1.0 else scores * self.scale
        scores = scores if bias is None else scores + bias.astype(jnp.float32)
        visible = jnp.arange(keys.shape[2]) < length[:, None]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, NEG), -1)
        out = jnp.einsum("bhts,bhsd->bthd", weights.astype(values.dtype), values)
        return self.o(out.reshape(*x.shape[:2], -1).astype(x.dtype))
