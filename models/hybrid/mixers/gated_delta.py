"""Gated delta net, the linear attention of Qwen3-Next and Qwen3.5.

Source: Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv 2412.06464), in
the form of the classes of transformers. `specjax.models.hybrid.recurrence` has the equations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.hybrid import recurrence as R
from specjax.models.hybrid.ancestry import Ancestry
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.reading import TokenInputs, read_pass
from specjax.models.products import pad_tokens
from specjax.types import Array

UNIT_EPS = 1e-6  # in the norm of queries and keys to unit length


class GatedDelta(nnx.Module):
    """A gated delta net with a short convolution before it and a gated norm after it."""

    def __init__(self, c: HybridConfig, rngs: nnx.Rngs):
        assert c.gated_delta is not None
        sizes = self.sizes = c.gated_delta
        linear = functools.partial(L.Linear, dtype=c.dtype, rngs=rngs)
        heads, output = sizes.num_value_heads, sizes.num_value_heads * sizes.value_dim
        self.convolved = linear(c.width, sizes.channels)
        self.output_gate = linear(c.width, output)
        self.beta = linear(c.width, heads)
        self.alpha = linear(c.width, heads)
        self.convolution = ConvolutionWeights(sizes.channels, sizes.kernel, dtype=c.dtype, rngs=rngs)
        self.decay = DecayWeights(heads, rngs=rngs)
        self.norm = L.RMSNorm(sizes.value_dim, c.norm_eps, dtype=c.dtype)
        self.out = linear(output, c.width)

    def __call__(
        self, x: Array, shared: L.PassInputs, ancestry: Ancestry, memory: R.RecurrentState, earlier: R.Updates | None
    ) -> tuple[Array, R.Updates]:
        """Return the output, like x [B, T', D], and the updates of the T tokens of the pass."""
        sizes, count = self.sizes, shared.positions.shape[1]
        assert memory.state is not None
        new = lambda y: shared.place(L.isolated(y)[:, :count], "data", None, None)
        inputs = new(self.convolved(x))
        past = ancestry.past_inputs(memory.window, None if earlier is None else earlier.inputs, inputs)
        q, k, v = self._heads(jax.nn.silu(self.convolution([*past, inputs])), shared)
        beta = jax.nn.sigmoid(new(self.beta(x)).astype(jnp.float32))
        tokens = TokenInputs(q, k, v, self.decay(new(self.alpha(x))), beta)
        reading = read_pass(tokens, memory.state, ancestry, earlier)
        z = new(self.output_gate(x)).reshape(*x.shape[:1], count, sizes.num_value_heads, sizes.value_dim)
        y = gated_norm(self.norm, reading.output, z)
        y = pad_tokens(y.reshape(*y.shape[:2], -1).astype(x.dtype), x.shape[1])
        return shared.sum(self.out(y), "heads"), R.Updates(inputs, k, *reading[1:])

    def _heads(self, y: Array, shared: L.PassInputs) -> tuple[Array, Array, Array]:
        """Split channels [B, T, C] into unit queries and keys float32[B, T, G, d], and values [B, T, H, v]."""
        sizes = self.sizes
        keys = sizes.num_key_heads * sizes.key_dim
        split = lambda y, size: shared.place(y.reshape(*y.shape[:2], -1, size), "data", None, "heads", None)
        q, k = (split(part, sizes.key_dim) for part in (y[..., :keys], y[..., keys : 2 * keys]))
        unit = lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + UNIT_EPS)
        return unit(q) * sizes.key_dim**-0.5, unit(k), split(y[..., 2 * keys :], sizes.value_dim)


def gated_norm(norm: L.RMSNorm, output: Array, gate: Array) -> Array:
    """Return norm(output) * silu(gate), float32. The gate is not part of the norm."""
    return norm(output) * jax.nn.silu(gate.astype(jnp.float32))


class ConvolutionWeights(nnx.Module):
    """Weights of a causal depthwise convolution."""

    def __init__(self, channels: int, kernel: int, *, bias: bool = False, dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (channels, kernel), dtype) * kernel**-0.5)
        self.bias = nnx.Param(jnp.zeros((channels,), dtype)) if bias else None

    def __call__(self, inputs: Sequence[Array]) -> Array:
        """Return the convolution float32[B, T, C] of the inputs [B, T, C] at distance kernel - 1, ..., 0."""
        return R.convolve(inputs, self.kernel[...], None if self.bias is None else self.bias[...])


class DecayWeights(nnx.Module):
    """Decay of each head: g = rate * softplus(a + bias), with a negative rate. All are float32."""

    def __init__(self, heads: int, *, rngs: nnx.Rngs):
        self.rate = nnx.Param(-jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0))
        self.bias = nnx.Param(jnp.ones((heads,), jnp.float32))

    def time_steps(self, a: Array) -> Array:
        """Return softplus(a + bias) float32[B, T, H]."""
        return jax.nn.softplus(a.astype(jnp.float32) + self.bias[...])

    def __call__(self, a: Array) -> Array:
        """Return the logarithms g float32[B, T, H] of the decays."""
        return self.rate[...] * self.time_steps(a)
