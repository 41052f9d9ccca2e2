"""Encoder-decoders of the BART family (arXiv 1910.13461), which Whisper (arXiv 2212.04356) belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.seq2seq.config import BartConfig, WhisperConfig
from specjax.models.seq2seq.model import EncoderDecoder
from specjax.models.seq2seq.sublayers import PlainMLP, SourceAttention
from specjax.types import Array, Best, EncodedInputs, Mixture, Stream


def make_layer_norm(c: BartConfig) -> L.LayerNorm:
    """Create a norm."""
    return L.LayerNorm(c.width, c.norm_eps, dtype=c.dtype)


class Unchanged(nnx.Module):
    """A norm that returns its input."""

    def __call__(self, x: Array) -> Array:
        return x


class Positions(nnx.Module):
    """A table of vectors [P, D] that are added to the embeddings of the positions."""

    def __init__(self, count: int, c: BartConfig, rngs: nnx.Rngs):
        shape = count + c.position_offset, c.width
        self.table = nnx.Param(jax.random.normal(rngs.params(), shape, c.dtype) * c.width**-0.5)
        self.offset = c.position_offset

    def __call__(self, positions: Array) -> Array:
        """Return the vectors [..., D] of positions int32[...]; unused ones may lie outside of the table."""
        return jnp.take(self.table[...], positions + self.offset, axis=0, mode="clip")


def add_sublayer(c: BartConfig, x: Array, norm: L.LayerNorm, sublayer: Callable[[Array], Array]) -> Array:
    """Return the stream after a sublayer, with its norm before it or after the sum."""
    return norm(x + sublayer(x)) if c.norms_after else x + sublayer(norm(x))


class BartEncoderBlock(nnx.Module):
    """A layer of the encoder, in which every entry sees the complete source."""

    def __init__(self, c: BartConfig, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = make_layer_norm(c), make_layer_norm(c)
        head_dim = c.width // c.encoder_heads
        self.attention = SourceAttention(
            c, c.encoder_heads, head_dim, rngs, scale=head_dim**-0.5, bias=True, key_bias=c.key_bias
        )
        self.mlp = PlainMLP(c, c.encoder_mlp_width, rngs, bias=True)
        self.config = c

    def __call__(self, x: Array, length: Array) -> Array:
        attend = lambda y: self.attention(y, *self.attention.keys_and_values(y), length)
        x = add_sublayer(self.config, x, self.attention_norm, attend)
        return add_sublayer(self.config, x, self.mlp_norm, self.mlp)


class BartDecoderBlock(nnx.Module):
    """A layer of the decoder: attention to the text, then to the source, then an MLP."""

    def __init__(self, c: BartConfig, rngs: nnx.Rngs):
        self.attention_norm, self.source_norm, self.mlp_norm = (make_layer_norm(c) for _ in range(3))
        self.attention = make_attention(c, rngs=rngs)
        self.source = SourceAttention(
            c, c.num_heads, c.head_dim, rngs, scale=c.head_dim**-0.5, bias=True, key_bias=c.key_bias
        )
        self.mlp = PlainMLP(c, c.mlp_width, rngs, bias=True)
        self.config = c

    def __call__(self, x: Array, inputs: L.LayerInputs, keys: Array, values: Array, length: Array):
        """Return the stream [B, T, D] after the layer, and the (k, v) of the text's new tokens."""
        c = self.config
        y, new = self.attention(x if c.norms_after else self.attention_norm(x), inputs)
        x = self.attention_norm(x + y) if c.norms_after else x + y
        x = add_sublayer(c, x, self.source_norm, lambda y: self.source(y, keys, values, length))
        return add_sublayer(c, x, self.mlp_norm, self.mlp), new


class BartModel(EncoderDecoder):
    """An encoder of source tokens, and a decoder of text tokens, both with learned positions."""

    config: BartConfig

    def __init__(self, config: BartConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        super().__init__(config, rngs=rngs, layers=layers)
        c = config
        self.positions = Positions(c.text_positions, c, rngs)
        final: Callable[[], Any] = lambda: Unchanged() if c.norms_after else make_layer_norm(c)
        first = lambda: make_layer_norm(c) if c.embedding_norm else None
        if not c.shares_encoder:
            self.encoder_positions = Positions(c.source_positions, c, rngs)
            self.encoder = nnx.List([BartEncoderBlock(c, rngs) for _ in range(c.encoder_layers)])
            self.encoder_norm, self.encoder_embedding_norm = final(), first()
        self.norm, self.embedding_norm = final(), first()
        self.logits_bias = nnx.Dict(table=nnx.Param(jnp.zeros((c.vocab_size,), c.dtype))) if c.logits_bias else None

    @staticmethod
    def make_layer(config: BartConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:
        return BartDecoderBlock(config, rngs)

    def encode(self, source: Any) -> EncodedInputs:
        """Encode a `Source`."""
        return self._encode(self.embed_tokens(source.tokens), source.length, source)

    def _encode(self, x: Array, length: Array, inputs: Any) -> EncodedInputs:
        """Run the layers of the encoder on a source [B, S, D] without positions."""
        x = x + self.encoder_positions(jnp.arange(x.shape[1]))
        x = x if self.encoder_embedding_norm is None else self.encoder_embedding_norm(x)
        for block in self.encoder:
            x = block(x, length)
        return EncodedInputs(self.encoder_norm(x), length, inputs)

    def settings(self) -> Sequence[L.AttentionSettings]:
        return [L.AttentionSettings(None)] * self.config.num_layers

    def read_tokens(self, tokens: Array | Mixture | Stream, positions: Array) -> Array:
        x = self.embed_tokens(tokens) + self.positions(positions)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def predict(self, hidden: Array, layout=None) -> Array:
        logits = super().predict(hidden, layout)
        return logits if self.logits_bias is None else logits + self.logits_bias["table"][...].astype(logits.dtype)

    def predict_best(self, hidden: Array, k: int) -> Best:
        if self.logits_bias is None:
            return super().predict_best(hidden, k)
        logits = self.predict(hidden)  # the bias is not split into blocks
        best, tokens = jax.lax.top_k(logits, k)
        return Best(tokens, best, jax.nn.logsumexp(logits, -1))


class FrameConvolution(nnx.Module):
    """A convolution over time with three taps: weight [D, C, 3]."""

    def __init__(self, fan_in: int, c: WhisperConfig, rngs: nnx.Rngs, *, stride: int):
        shape = c.width, fan_in, 3
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, c.dtype) * (3 * fan_in) ** -0.5)
        self.bias = nnx.Param(jnp.zeros((c.width,), c.dtype))
        self.stride = stride

    def __call__(self, x: Array) -> Array:
        y = jax.lax.conv_general_dilated(
            x, self.weight[...], (self.stride,), [(1, 1)], dimension_numbers=("NWC", "OIW", "NWC")
        )
        return y + self.bias[...]


class WhisperModel(BartModel):
    """An encoder of log-mel spectrograms, and a decoder of text tokens."""

    config: WhisperConfig

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        super().__init__(config, rngs=rngs, layers=layers)
        if not config.shares_encoder:
            self.encoder_conv1 = FrameConvolution(config.mel_bins, config, rngs, stride=1)
            self.encoder_conv2 = FrameConvolution(config.width, config, rngs, stride=2)

    def encode(self, source: Any) -> EncodedInputs:
        """Encode a `Spectrogram`."""
        x = source.frames.swapaxes(1, 2).astype(self.config.dtype)
        for convolution in (self.encoder_conv1, self.encoder_conv2):
            x = jax.nn.gelu(convolution(x), approximate=False)
        return self._encode(x, jnp.full(len(x), x.shape[1], jnp.int32), source)
