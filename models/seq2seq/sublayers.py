"""Sublayers of an encoder-decoder: attention over a fixed set of keys, and MLPs with or without a gate."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.seq2seq.config import Seq2SeqConfig
from specjax.pallas_kernels.tree_attention.reference import NEG
from specjax.types import Array


def activation(c: Seq2SeqConfig):
    """Return the activation function of the MLPs."""
    return jax.nn.relu if c.feed_activation == "relu" else functools.partial(jax.nn.gelu, approximate=True)


class PlainMLP(nnx.Module):
    """Feed-forward block without a gate: down(act(up(x)))."""

    def __init__(self, c: Seq2SeqConfig, rngs: nnx.Rngs):
        self.up = L.Linear(c.width, c.mlp_width, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(c.mlp_width, c.width, dtype=c.dtype, rngs=rngs)
        self.act = activation(c)

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


def make_mlp(c: Seq2SeqConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Create the MLP of a layer."""
    if not c.gated:
        return PlainMLP(c, rngs)
    return L.GatedMLP(c.width, c.mlp_width, activation(c), dtype=c.dtype, rngs=rngs)


def make_norm(c: Seq2SeqConfig) -> L.RMSNorm:
    """Create a norm."""
    return L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)


class SourceAttention(nnx.Module):
    """Attention over the tokens of a source, which all queries see. Scores are not scaled."""

    def __init__(self, c: Seq2SeqConfig, rngs: nnx.Rngs):
        linear = functools.partial(L.Linear, dtype=c.dtype, rngs=rngs)
        self.q, self.k, self.v = (linear(c.width, c.num_heads * c.head_dim) for _ in range(3))
        self.o = linear(c.num_heads * c.head_dim, c.width)
        self.head_dim = c.head_dim

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
        scores = scores if bias is None else scores + bias.astype(jnp.float32)
        visible = jnp.arange(keys.shape[2]) < length[:, None]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, NEG), -1)
        out = jnp.einsum("bhts,bhsd->bthd", weights.astype(values.dtype), values)
        return self.o(out.reshape(*x.shape[:2], -1).astype(x.dtype))
