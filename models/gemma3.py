"""Gemma 3, text only: local and global attention, two rope bases, q/k norms, norms on both sides of each block."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import rounding
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.types import Appended, Array, Mixture, Output, Stream

GLOBAL = 1 << 30  # a window wider than any text


@dataclass(frozen=True)
class Gemma3Config:
    """Shapes and constants of a Gemma 3 text model."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    is_global: tuple[bool, ...]  # per layer: full attention, else a sliding window
    window: int = 512
    rope_base: float = 1_000_000.0  # of the global layers
    rope_scaling: L.RopeScaling | None = None  # likewise
    local_rope_base: float = 10_000.0
    query_scale: float | None = None  # factor on q.k; None: head_dim ** -0.5
    norm_eps: float = 1e-6
    tied: bool = True
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    max_positions: int = 32768
    dtype: str = "float32"
    cache_dtype: str | None = None  # "int8": keys and values with one scale per token and head, lossy; None: dtype
    cache_lanes: int = 1
    cache_bits: bool = False
    same_bits: bool = False
    stacked: bool = False
    name: str = "gemma3"


class Block(nnx.Module):
    """As in Llama, with a second norm behind attention and MLP."""

    def __init__(self, c: Gemma3Config, rngs: nnx.Rngs):
        norm = functools.partial(L.RMSNorm, c.width, c.norm_eps, dtype=c.dtype, same_bits=c.same_bits)
        self.attention_norm, self.attention_post_norm = norm(), norm()
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.attention = L.Attention(
            c.width, c.num_heads, c.num_kv_heads, c.head_dim,
            qk_norm_eps=c.norm_eps, scale=c.query_scale, softcap=c.attention_softcap,
            same_bits=c.same_bits, dtype=c.dtype, rngs=rngs,
        )  # fmt: skip
        gelu = rounding.gelu if c.same_bits else functools.partial(jax.nn.gelu, approximate=True)
        self.mlp = L.GatedMLP(c.width, c.mlp_width, gelu, same_bits=c.same_bits, dtype=c.dtype, rngs=rngs)

    def attend(self, x, inputs: L.LayerInputs):
        attended, new = self.attention(self.attention_norm(x), inputs)
        return self.attention_post_norm(attended), new

    def keys(self, x, inputs: L.LayerInputs):
        return self.attention.keys(self.attention_norm(x), inputs)

    def feed(self, x, step: L.Step):
        return self.mlp_post_norm(step.sum(self.mlp(self.mlp_norm(x)), "mlp"))


class Gemma3(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: Gemma3Config, *, rngs: nnx.Rngs):
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
        full = L.rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling)
        local = L.rope_frequencies(c.head_dim, c.local_rope_base)
        is_global = jnp.array(c.is_global)
        reach = L.Reach(jnp.where(is_global[:, None], full, local), jnp.where(is_global, GLOBAL, c.window))
        x = L.with_vectors(lambda tokens: self.embedded(tokens, layout), tokens)
        stream, pending = run_layers(self.layers, x, step, cache, reach)
        hidden = self.norm(stream[-1])
        return Output(self.predict(hidden, layout), hidden, tuple(stream[tap] for tap in taps)), pending

    def embedded(self, tokens: Array | Mixture | Stream, layout=None) -> Array:
        """What the first layer reads: [B, T, D]."""
        x = tokens.values if isinstance(tokens, Stream) else self.embed(tokens)
        x = x if layout is None else layout.place(x, "data", None, None)
        return x if isinstance(tokens, Stream) else x * jnp.asarray(self.config.width**0.5, x.dtype)

    def predict(self, hidden: Array, layout=None) -> Array:
        """Logits of normed states [..., D]."""
        c, logits = self.config, (self.head or self.embed).logits(hidden)
        logits = logits if layout is None else layout.over_vocabulary(logits)
        return logits if c.logit_softcap is None else c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
