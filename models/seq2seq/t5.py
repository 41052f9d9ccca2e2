"""Encoder-decoder of the T5 family (arXiv 1910.10683): RMS norms, and biases of attention by distance."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.seq2seq.config import T5Config
from specjax.models.seq2seq.distance_bias import between, by_distance
from specjax.models.seq2seq.model import EncoderDecoder
from specjax.models.seq2seq.sublayers import PlainMLP, SourceAttention, activation
from specjax.types import Array, Best, EncodedInputs, Source


def make_norm(c: T5Config) -> L.RMSNorm:
    """Create a norm."""
    return L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)


def make_mlp(c: T5Config, rngs: nnx.Rngs) -> nnx.Module:
    """Create the MLP of a layer."""
    if not c.gated:
        return PlainMLP(c, c.mlp_width, rngs)
    return L.GatedMLP(c.width, c.mlp_width, activation(c), dtype=c.dtype, rngs=rngs)


class T5EncoderBlock(nnx.Module):
    """A layer of the encoder, in which every token sees the complete source."""

    def __init__(self, c: T5Config, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = make_norm(c), make_norm(c)
        self.attention = SourceAttention(c, c.num_heads, c.head_dim, rngs)
        self.mlp = make_mlp(c, rngs)

    def __call__(self, x: Array, length: Array, bias: Array) -> Array:
        y = self.attention_norm(x)
        x = x + self.attention(y, *self.attention.keys_and_values(y), length, bias)
        return x + self.mlp(self.mlp_norm(x))


class T5DecoderBlock(nnx.Module):
    """A layer of the decoder: attention to the text, then to the source, then an MLP."""

    def __init__(self, c: T5Config, rngs: nnx.Rngs):
        self.attention_norm, self.source_norm, self.mlp_norm = make_norm(c), make_norm(c), make_norm(c)
        self.attention = make_attention(c, rngs=rngs)
        self.source = SourceAttention(c, c.num_heads, c.head_dim, rngs)
        self.mlp = make_mlp(c, rngs)

    def __call__(self, x: Array, inputs: L.LayerInputs, keys: Array, values: Array, length: Array):
        """Return the stream [B, T, D] after the layer, and the (k, v) of the text's new tokens."""
        y, new = self.attention(self.attention_norm(x), inputs)
        x = x + y
        x = x + self.source(self.source_norm(x), keys, values, length)
        return x + self.mlp(self.mlp_norm(x)), new


class T5Model(EncoderDecoder):
    """An encoder of source tokens, and a decoder of text tokens."""

    config: T5Config

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        super().__init__(config, rngs=rngs, layers=layers)
        c = config
        if not c.shares_encoder:
            self.encoder = nnx.List([T5EncoderBlock(c, rngs) for _ in range(c.encoder_layers)])
            self.encoder_norm = make_norm(c)
        table = lambda: nnx.Param(jax.random.normal(rngs.params(), (c.buckets.num_buckets, c.num_heads), c.dtype))
        tables = lambda layers: nnx.List([nnx.Dict(table=table()) for _ in range(layers if c.bias_per_layer else 1)])
        if not c.shares_encoder:
            self.encoder_bias = tables(c.encoder_layers)
        self.bias = tables(c.num_layers)

    @staticmethod
    def make_layer(config: T5Config, layer: int, rngs: nnx.Rngs) -> nnx.Module:
        return T5DecoderBlock(config, rngs)

    def encode(self, source: Source) -> EncodedInputs:
        x = self.embed(source.tokens)
        biases = [between(table["table"][...], self.config.buckets, x.shape[1]) for table in self.encoder_bias]
        for i, block in enumerate(self.encoder):
            x = block(x, source.length, biases[i % len(biases)])
        return EncodedInputs(self.encoder_norm(x), source.length, source)

    def settings(self) -> Sequence[L.AttentionSettings]:
        biases = [by_distance(table["table"][...], self.config.buckets) for table in self.bias]
        return [L.AttentionSettings(None, bias=biases[i % len(biases)]) for i in range(self.config.num_layers)]

    def predict(self, hidden: Array, layout=None) -> Array:
        return super().predict(self._scaled(hidden), layout)

    def predict_best(self, hidden: Array, k: int) -> Best:
        return super().predict_best(self._scaled(hidden), k)

    def _scaled(self, hidden: Array) -> Array:
        c = self.config
        return hidden * jnp.asarray(c.width**-0.5, hidden.dtype) if c.scales_output else hidden
