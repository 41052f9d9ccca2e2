"""Mamba-2 mixer, a state-space layer with one decay per head.

Source: Dao and Gu 2024, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
Space Duality (arXiv 2405.21060), in the form of the classes of transformers. Wu et al. 2025, STree (arXiv 2505.14969),
has its tree form. `specjax.models.hybrid.recurrence` has the equations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.hybrid import recurrence as R
from specjax.models.hybrid.ancestry import Ancestry
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.mixers.gated_delta import ConvolutionWeights, DecayWeights
from specjax.models.hybrid.reading import TokenInputs, read_pass
from specjax.models.products import pad_tokens
from specjax.types import Array


class Mamba2(nnx.Module):
    """A Mamba-2 mixer with a short convolution before it and a gated norm after it."""

    def __init__(self, c: HybridConfig, rngs: nnx.Rngs):
        assert c.mamba2 is not None
        sizes = self.sizes = c.mamba2
        linear = functools.partial(L.Linear, dtype=c.dtype, rngs=rngs)
        self.output_gate = linear(c.width, sizes.inner, bias=sizes.bias)
        self.convolved = linear(c.width, sizes.channels, bias=sizes.bias)
        self.time_step = linear(c.width, sizes.num_heads, bias=sizes.bias)
        self.convolution = ConvolutionWeights(
            sizes.channels, sizes.kernel, bias=sizes.conv_bias, dtype=c.dtype, rngs=rngs
        )
        self.decay = DecayWeights(sizes.num_heads, rngs=rngs)
        self.skip = SkipWeights(sizes.num_heads)
        self.norm = L.RMSNorm(sizes.inner, c.norm_eps, dtype=c.dtype) if sizes.has_norm else None
        self.out = linear(sizes.inner, c.width, bias=sizes.out_bias)

    def __call__(
        self, x: Array, shared: L.PassInputs, ancestry: Ancestry, memory: R.RecurrentState, earlier: R.Updates | None
    ) -> tuple[Array, R.Updates]:
        """Return the output, like x [B, T', D], and the updates of the T tokens of the pass."""
        sizes, count = self.sizes, shared.positions.shape[1]
        assert memory.state is not None
        scale_z, *scale_xbc, scale_dt = sizes.multipliers or (1.0,) * 5
        new = lambda y: shared.place(L.isolated(y)[:, :count], "data", None, None)
        inputs = new(self.convolved(x))
        if sizes.multipliers is not None:
            parts = (sizes.inner, *(sizes.num_groups * sizes.state_dim,) * 2)
            inputs = inputs * jnp.repeat(
                jnp.array(scale_xbc, x.dtype), jnp.array(parts), total_repeat_length=sum(parts)
            )
        past = ancestry.past_inputs(memory.window, None if earlier is None else earlier.inputs, inputs)
        values, key, query = self._heads(jax.nn.silu(self.convolution([*past, inputs])), shared)
        step = jnp.clip(self.decay.time_steps(new(self.time_step(x)) * scale_dt), *sizes.time_step_limit)
        tokens = TokenInputs(query, key, values * step[..., None], self.decay.rate[...] * step)
        reading = read_pass(tokens, memory.state, ancestry, earlier)
        y = reading.output + self.skip.weight[...][:, None] * values
        y = self._gated_norm(y.reshape(*y.shape[:2], -1), new(self.output_gate(x)).astype(jnp.float32) * scale_z)
        return (
            shared.sum(self.out(pad_tokens(y.astype(x.dtype), x.shape[1])), "heads"),
            R.Updates(inputs, key, *reading[1:]),
        )

    def _heads(self, y: Array, shared: L.PassInputs) -> tuple[Array, Array, Array]:
        """Split channels float32[B, T, C] into x [B, T, H, P], B and C [B, T, G, N]."""
        sizes = self.sizes
        per_part = sizes.num_groups * sizes.state_dim
        split = lambda y, size: shared.place(y.reshape(*y.shape[:2], -1, size), "data", None, "heads", None)
        x, b, c = jnp.split(y, (sizes.inner, sizes.inner + per_part), -1)
        return split(x, sizes.head_dim), split(b, sizes.state_dim), split(c, sizes.state_dim)

    def _gated_norm(self, y: Array, z: Array) -> Array:
        """Return y float32[B, T, C] after the gate and the norm, in the order of the model."""
        sizes, gate = self.sizes, jax.nn.silu(z)
        if self.norm is None:
            return y * gate
        y = y if sizes.norm_before_gate else y * gate
        parts = y.reshape(*y.shape[:-1], sizes.num_groups, -1)
        scaled = parts * jax.lax.rsqrt(jnp.mean(parts * parts, -1, keepdims=True) + self.norm.eps)
        normed = scaled.reshape(y.shape) * self.norm.weight[...].astype(jnp.float32)
        return normed * gate if sizes.norm_before_gate else normed


class SkipWeights(nnx.Module):
    """Factor of each head on its input, which is added to the output."""

    def __init__(self, heads: int):
        self.weight = nnx.Param(jnp.ones((heads,), jnp.float32))
