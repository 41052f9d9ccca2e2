"""Encoder-decoder of the T5 family (arXiv 1910.10683) as one module: `encode` runs once, `__call__` in every pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import LanguageModel, make_attention
from specjax.models.seq2seq.config import Seq2SeqConfig
from specjax.models.seq2seq.distance_bias import between, by_distance
from specjax.models.seq2seq.memory import Seq2SeqCache, Source, SourceMemory
from specjax.models.seq2seq.sublayers import SourceAttention, make_mlp, make_norm
from specjax.types import Array, Best, Mixture, Output, PyTree, Stream


class EncoderBlock(nnx.Module):
    """A layer of the encoder, in which every token sees the complete source."""

    def __init__(self, c: Seq2SeqConfig, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = make_norm(c), make_norm(c)
        self.attention = SourceAttention(c, rngs)
        self.mlp = make_mlp(c, rngs)

    def __call__(self, x: Array, length: Array, bias: Array) -> Array:
        y = self.attention_norm(x)
        x = x + self.attention(y, *self.attention.keys_and_values(y), length, bias)
        return x + self.mlp(self.mlp_norm(x))


class Seq2SeqBlock(nnx.Module):
    """A layer of the decoder: attention to the text, then to the source, then an MLP."""

    def __init__(self, c: Seq2SeqConfig, rngs: nnx.Rngs):
        self.attention_norm, self.source_norm, self.mlp_norm = make_norm(c), make_norm(c), make_norm(c)
        self.attention = make_attention(c, rngs=rngs)
        self.source = SourceAttention(c, rngs)
        self.mlp = make_mlp(c, rngs)

    def __call__(self, x: Array, inputs: L.LayerInputs, keys: Array, values: Array, length: Array):
        """Return the stream [B, T, D] after the layer, and the (k, v) of the text's new tokens."""
        y, new = self.attention(self.attention_norm(x), inputs)
        x = x + y
        x = x + self.source(self.source_norm(x), keys, values, length)
        return x + self.mlp(self.mlp_norm(x)), new


class EncoderDecoder(LanguageModel):
    """An encoder of source tokens, and a decoder of text tokens."""

    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        super().__init__(config, rngs=rngs, layers=layers)
        c = config
        self.encoder = nnx.List([EncoderBlock(c, rngs) for _ in range(c.encoder_layers)])
        self.encoder_norm = make_norm(c)
        table = lambda: nnx.Param(jax.random.normal(rngs.params(), (c.buckets.num_buckets, c.num_heads), c.dtype))
        tables = lambda layers: nnx.List([nnx.Dict(table=table()) for _ in range(layers if c.bias_per_layer else 1)])
        self.encoder_bias, self.bias = tables(c.encoder_layers), tables(c.num_layers)

    @staticmethod
    def make_layer(config: Seq2SeqConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:
        return Seq2SeqBlock(config, rngs)

    def encode(self, source: Source) -> SourceMemory:
        """Run the encoder. Return the keys and values of the source for each layer of the decoder."""
        x = self.embed(source.tokens)
        biases = [between(table["table"][...], self.config.buckets, x.shape[1]) for table in self.encoder_bias]
        for i, block in enumerate(self.encoder):
            x = block(x, source.length, biases[i % len(biases)])
        x = self.encoder_norm(x)
        keys, values = zip(*(block.source.keys_and_values(x) for block in self.layers), strict=True)
        return SourceMemory(keys, values, source.length)

    def __call__(
        self, tokens: Array | Mixture | Stream, cache: Seq2SeqCache, *, positions: Array, mask: Array,
        taps: tuple[int, ...] = (), earlier: kv.Pending | None = None,
    ) -> tuple[Output, kv.Pending]:  # fmt: skip
        """Run the decoder on new tokens, as `Model.forward` does."""
        shared = L.make_pass_inputs(positions, mask, cache.text, earlier, None)
        pending = L.keys_and_values(earlier)
        biases = [by_distance(table["table"][...], self.config.buckets) for table in self.bias]
        source = cache.source

        # `jit` lets equal layers share one trace.
        @functools.partial(jax.jit, static_argnums=0)
        def run_layer(graphdef, state, x, inputs, keys, values, length):
            return nnx.merge(graphdef, state)(x, inputs, keys, values, length)

        x = self.embed_tokens(tokens)
        stream, new = [x], []
        for i, block in enumerate(self.layers):
            settings = L.AttentionSettings(None, bias=biases[i % len(biases)])
            inputs = L.LayerInputs(shared, L.LayerCache.of_layer(cache.text, i, pending), settings)
            x, entries = run_layer(*nnx.split(block), x, inputs, source.k[i], source.v[i], source.length)
            stream.append(x)
            new.append(entries)
        k, v = zip(*new, strict=True)
        hidden = self.norm(x)
        output = Output(self.predict(hidden), hidden, tuple(stream[tap] for tap in taps))
        return output, kv.Pending(k, v, positions, kv.write_dependency(x))

    def predict(self, hidden: Array, layout=None) -> Array:
        return super().predict(self._scaled(hidden), layout)

    def predict_best(self, hidden: Array, k: int) -> Best:
        return super().predict_best(self._scaled(hidden), k)

    def _scaled(self, hidden: Array) -> Array:
        c = self.config
        return hidden * jnp.asarray(c.width**-0.5, hidden.dtype) if c.scales_output else hidden


def pass_params(params: PyTree) -> PyTree:
    """Return the parameters that a pass of the decoder reads. The source was encoded before."""
    decoder = {name: part for name, part in params.items() if not name.startswith("encoder")}
    of_queries = lambda source: {name: source[name] for name in ("q", "o")}
    layers = {i: layer | {"source": of_queries(layer["source"])} for i, layer in params["layers"].items()}
    return decoder | {"layers": layers}
