"""Inputs of each layer besides the stream, computed once from a pass's tokens, and the scales of layers.

Gemma 4 calls them per-layer embeddings. With the embedding e of a token, of width D, layer i has the input

    u_i = (sqrt(w) T[token]_i + norm(W e / sqrt(D))_i) / sqrt(2)

of w numbers, and after its MLP it adds norm(P (gelu(G x) * u_i)) to the stream x. Its output is then multiplied by one
number. Source: `Gemma4TextModel` of transformers 5.24.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.decoder import activation_function
from specjax.models.hybrid.config import HybridConfig
from specjax.models.products import pad_tokens
from specjax.types import Array, Mixture


class LayerInputTable(nnx.Module):
    """The table of all layers and the projection of the embedding."""

    def __init__(self, c: HybridConfig, rngs: nnx.Rngs):
        sizes = c.layer_inputs
        assert sizes is not None
        self.width, joined = sizes.width, c.num_layers * sizes.width
        self.table = L.Embedding(sizes.vocab_size, joined, dtype=c.dtype, rngs=rngs)
        self.projection = L.Linear(c.width, joined, dtype=c.dtype, rngs=rngs)
        self.norm = L.RMSNorm(sizes.width, c.norm_eps, dtype=c.dtype)

    def __call__(self, tokens: Array | Mixture, x: Array) -> Array:
        """Return the inputs [layers, B, T, w] of all layers for tokens [B, T] with embeddings x [B, T, D]."""
        split = lambda y: jnp.moveaxis(y.reshape(*x.shape[:2], -1, self.width), 2, 0)
        projected = self.norm(split(self.projection(x) * x.shape[-1] ** -0.5))
        of_table = split(self.table(tokens)) * jnp.asarray(self.width**0.5, x.dtype)
        return (projected + of_table) * jnp.asarray(0.5**0.5, x.dtype)


class LayerInputReader(nnx.Module):
    """The part of a layer that reads its input."""

    def __init__(self, c: HybridConfig, rngs: nnx.Rngs):
        sizes = c.layer_inputs
        assert sizes is not None
        self.gate = L.Linear(c.width, sizes.width, dtype=c.dtype, rngs=rngs)
        self.projection = L.Linear(sizes.width, c.width, dtype=c.dtype, rngs=rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.act = activation_function(c)

    def __call__(self, x: Array, layer_input: Array) -> Array:
        """Return what the layer adds to the stream x [B, T, D], which may have more tokens than the pass."""
        return self.norm(self.projection(self.act(self.gate(x)) * pad_tokens(layer_input, x.shape[1])))


class Scale(nnx.Module):
    """A factor on the stream after a layer."""

    def __init__(self, dtype):
        self.weight = nnx.Param(jnp.ones((1,), dtype))

    def __call__(self, x: Array) -> Array:
        return x * self.weight[...]


def at_members(inputs: Array | None, repeats: int | None = None) -> list:
    """Return the inputs [layers, B, T, w] of each layer, or of each member of a repeating group [repeats, B, T, w].

    repeats: number of repetitions of the group; None: layers are separate.
    """
    if inputs is None:
        return []
    if repeats is None:
        return list(inputs)
    grouped = inputs.reshape(repeats, -1, *inputs.shape[1:])
    return [jax.lax.index_in_dim(grouped, member, 1, keepdims=False) for member in range(grouped.shape[1])]
