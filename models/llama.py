"""The Llama family: Llama 2/3, SmolLM2, Mistral, and Qwen2 (biases) and Qwen3 (q/k norms)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flax import nnx

from specjax import rounding
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.types import Appended, Array, Mixture, Output, Stream


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of a Llama-type model."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_base: float = 10000.0
    rope_scaling: L.RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True  # the head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # sliding-window attention in every layer
    max_positions: int = 8192
    dtype: str = "float32"
    cache_dtype: str | None = None  # "int8": keys and values with one scale per token and head, lossy; None: dtype
    cache_lanes: int = 1  # the cache keeps heads filled up to a multiple of these; 128 on TPU
    cache_bits: bool = False  # the cache keeps bfloat16 as uint16, which XLA on CPU writes in place
    same_bits: bool = False  # of bfloat16: a token's logits do not depend on the pass that it is in, docs/same_bits.md
    stacked: bool = False  # layers stacked and scanned, not unrolled
    name: str = "llama"

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        amplitude = 1.0 if self.rope_scaling is None else self.rope_scaling.amplitude
        return self.head_dim**-0.5 * amplitude**2


class Block(nnx.Module):
    """Attention and MLP, each behind a norm: what they add to the stream."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        norm = functools.partial(L.RMSNorm, c.width, c.norm_eps, dtype=c.dtype, same_bits=c.same_bits)
        self.attention_norm = norm()
        self.attention = L.Attention(
            c.width, c.num_heads, c.num_kv_heads, c.head_dim,
            bias=c.qkv_bias, qk_norm_eps=c.norm_eps if c.qk_norm else None, scale=c.attention_scale,
            same_bits=c.same_bits, dtype=c.dtype,
            rngs=rngs,
        )  # fmt: skip
        self.mlp_norm = norm()
        act = rounding.silu if c.same_bits else nnx.silu
        self.mlp = L.GatedMLP(c.width, c.mlp_width, act, same_bits=c.same_bits, dtype=c.dtype, rngs=rngs)

    def attend(self, x, inputs: L.LayerInputs):
        return self.attention(self.attention_norm(x), inputs)

    def keys(self, x, inputs: L.LayerInputs):
        return self.attention.keys(self.attention_norm(x), inputs)

    def feed(self, x, step: L.Step):
        return step.sum(self.mlp(self.mlp_norm(x)), "mlp")


class Llama(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.embed = L.Embedding(c.vocab_size, c.width, same_bits=c.same_bits, dtype=c.dtype, rngs=rngs)
        self.layers = L.make_layers(lambda r: Block(c, r), c.num_layers, c.stacked, rngs)
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype, same_bits=c.same_bits)
        self.head = (
            None if c.tied else L.Embedding(c.vocab_size, c.width, same_bits=c.same_bits, dtype=c.dtype, rngs=rngs)
        )

    def __call__(
        self, tokens: Array | Mixture | Stream | Appended, cache: kv.KVCache, *, positions: Array, mask: Array,
        taps=(), earlier=None, layers=None, layout=None, run_layers=L.run_layers,
    ) -> tuple[Output, kv.Pending]:  # fmt: skip
        c, step = self.config, L.make_step(positions, mask, cache, earlier, layout, layers)
        reach = L.Reach(L.rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling), c.window)
        x = L.with_vectors(lambda tokens: self.embedded(tokens, layout), tokens)
        stream, pending = run_layers(self.layers, x, step, cache, reach)
        hidden = self.norm(stream[-1])
        return Output(self.predict(hidden, layout), hidden, tuple(stream[tap] for tap in taps)), pending

    def embedded(self, tokens: Array | Mixture | Stream, layout=None) -> Array:
        """What the first layer reads: [B, T, D]."""
        x = tokens.values if isinstance(tokens, Stream) else self.embed(tokens)
        return x if layout is None else layout.place(x, "data", None, None)

    def predict(self, hidden: Array, layout=None) -> Array:
        """Logits of normed states [..., D]."""
        logits = (self.head or self.embed).logits(hidden)
        return logits if layout is None else layout.over_vocabulary(logits)
