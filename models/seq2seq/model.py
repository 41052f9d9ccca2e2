"""The decoder of encoder-decoder models as a module: `encode` runs once per call, `__call__` in every pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import LanguageModel
from specjax.models.seq2seq.memory import SourceMemory
from specjax.types import Array, EncodedInputs, Mixture, Output, PyTree, Source, Stream


class EncoderDecoder(LanguageModel):
    """An encoder of a source, and a decoder of text tokens. Families implement `encode` and `settings`.

    Their layers take the stream, `LayerInputs`, and the keys, values and lengths of the source.
    """

    config: Any

    def encode(self, source: Any) -> EncodedInputs:
        """Run the encoder."""
        raise NotImplementedError

    def settings(self) -> Sequence[L.AttentionSettings]:
        """Return the settings of the attention to the text in each layer."""
        raise NotImplementedError

    def read_tokens(self, tokens: Array | Mixture | Stream, positions: Array) -> Array:
        """Return the input [B, T, D] of the first layer for tokens at positions int32[B, T]."""
        return self.embed_tokens(tokens)

    def memory_of(self, encoded: EncodedInputs) -> SourceMemory:
        """Return the keys and values of an encoded source for each layer of the decoder, and its text."""
        keys, values = zip(*(block.source.keys_and_values(encoded.output) for block in self.layers), strict=True)
        text = encoded.inputs if isinstance(encoded.inputs, Source) else None
        return SourceMemory(keys, values, encoded.length, text)

    def __call__(
        self, tokens: Array | Mixture | Stream, cache: kv.ConditionedCache, *, positions: Array, mask: Array,
        taps: tuple[int, ...] = (), earlier: kv.Pending | None = None,
    ) -> tuple[Output, kv.Pending]:  # fmt: skip
        """Run the decoder on new tokens, as `Model.forward` does."""
        shared = L.make_pass_inputs(positions, mask, cache.text, earlier, None)
        pending = L.keys_and_values(earlier)
        source = cache.memory

        # `jit` lets equal layers share one trace.
        @functools.partial(jax.jit, static_argnums=0)
        def run_layer(graphdef, state, x, inputs, keys, values, length):
            return nnx.merge(graphdef, state)(x, inputs, keys, values, length)

        x = self.read_tokens(tokens, positions)
        stream, new = [x], []
        for i, (block, settings) in enumerate(zip(self.layers, self.settings(), strict=True)):
            inputs = L.LayerInputs(shared, L.LayerCache.of_layer(cache.text, i, pending), settings)
            x, entries = run_layer(*nnx.split(block), x, inputs, source.k[i], source.v[i], source.length)
            stream.append(x)
            new.append(entries)
        k, v = zip(*new, strict=True)
        hidden = self.norm(x)
        output = Output(self.predict(hidden), hidden, tuple(stream[tap] for tap in taps))
        return output, kv.Pending(k, v, positions, kv.write_dependency(x))


def is_of_encoder(name: str) -> bool:
    """Return True for the name of a part of the parameters that only the encoder reads."""
    return name.startswith("encoder")


def pass_params(params: PyTree) -> PyTree:
    """Return the parameters that a pass of the decoder reads. The source was encoded before."""
    decoder = {name: part for name, part in params.items() if not is_of_encoder(name)}
    of_queries = lambda source: {name: source[name] for name in ("q", "o")}
    layers = {i: layer | {"source": of_queries(layer["source"])} for i, layer in params["layers"].items()}
    return decoder | {"layers": layers}
