"""Janus and Janus-Pro: a Llama that writes text by one head and the codes of images by another (arXiv 2410.13848).

The vocabulary is the text's, followed by the codes: code c is the token `text_vocab + c`. So a token alone determines
how it enters: text by the embedding, codes by a narrow table and the aligner. The logits are those of both heads, side
by side, and a processor (`image_phases`) keeps one side. Trees, drafters, rules and caches then need no phase, because
every token id has one meaning.

With `writes_text` off the text's head is not read, and its logits are -inf: an image needs no text.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.image_tokens.decoder import CodeDecoder, CodeDecoderConfig
from specjax.models.vision.tower import activation_of
from specjax.types import Array, Mixture, Stream


@dataclass(frozen=True)
class JanusConfig(CodeDecoderConfig):
    """Shapes and constants of Janus. `vocab_size` counts the tokens of the text and the codes."""

    text_vocab: int = 102_400
    code_width: int = 8  # numbers of a code before the aligner
    writes_text: bool = True
    name: str = "janus"

    @property
    def codes(self) -> range:
        """Return the tokens of the codes."""
        return range(self.text_vocab, self.vocab_size)


class HiddenMLP(nnx.Module):
    """Two linear layers with biases, and the exact gelu between them."""

    def __init__(self, fan_in: int, width: int, fan_out: int, *, dtype, rngs: nnx.Rngs):
        self.up = L.Linear(fan_in, width, bias=True, dtype=dtype, rngs=rngs)
        self.down = L.Linear(width, fan_out, bias=True, dtype=dtype, rngs=rngs)
        self.act = activation_of("gelu")

    def __call__(self, x: Array, out_dtype=None) -> Array:
        """Map x [..., fan_in] to [..., fan_out]."""
        hidden = self.act(self.up(x)).astype(x.dtype)
        y = self.down.product(hidden, self.down.weight[...], out_dtype or x.dtype)
        return y if self.down.bias is None else y + self.down.bias[...]


class JanusDecoder(CodeDecoder):
    """A decoder with two vocabularies side by side."""

    config: JanusConfig

    def __init__(self, config: JanusConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        c = config
        super().__init__(dataclasses.replace(c, vocab_size=c.text_vocab), rngs=rngs, layers=layers)
        self.config = c
        self.code_table = L.Embedding(len(c.codes), c.code_width, dtype=c.dtype, rngs=rngs)
        self.aligner = HiddenMLP(c.code_width, c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.code_head = HiddenMLP(c.width, c.width, len(c.codes), dtype=c.dtype, rngs=rngs)

    def embed_tokens(self, tokens: Array | Mixture | Stream, layout=None) -> Array:
        if isinstance(tokens, Stream):
            return super().embed_tokens(tokens, layout)
        if not isinstance(tokens, Mixture):
            return self._vectors(tokens)
        rows = self._vectors(tokens.ids).astype(jnp.float32)  # [B, T, K, D]
        return jnp.sum(rows * tokens.weights[..., None], -2).astype(self.config.dtype)

    def _vectors(self, tokens: Array) -> Array:
        """Return the input vectors [..., D] of tokens of both kinds."""
        first = self.config.text_vocab
        codes = self.aligner(self.code_table(jnp.maximum(tokens - first, 0)))
        return jnp.where((tokens >= first)[..., None], codes, self.embed(jnp.minimum(tokens, first - 1)))

    def predict(self, hidden: Array, layout=None) -> Array:
        codes = self.code_head(hidden, jnp.float32)
        if self.config.writes_text:
            text = super().predict(hidden, layout)
        else:
            text = jnp.full((*hidden.shape[:-1], self.config.text_vocab), -jnp.inf, jnp.float32)
        return jnp.concatenate([text, codes], -1)
