"""Gated short convolution, the mixer of most layers of LFM2: out(c * convolution(b * x)) with [b, c, x] = input(n).

Source: the classes `Lfm2ShortConv` of transformers.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx

from specjax.models import layers as L
from specjax.models.hybrid import recurrence as R
from specjax.models.hybrid.ancestry import Ancestry
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.mixers.gated_delta import ConvolutionWeights
from specjax.models.products import pad_tokens
from specjax.types import Array


class ShortConvolution(nnx.Module):
    """A causal depthwise convolution between two gates."""

    def __init__(self, c: HybridConfig, rngs: nnx.Rngs):
        linear = functools.partial(L.Linear, bias=c.convolution_bias, dtype=c.dtype, rngs=rngs)
        self.input = linear(c.width, 3 * c.width)
        self.convolution = ConvolutionWeights(
            c.width, c.convolution_kernel, bias=c.convolution_bias, dtype=c.dtype, rngs=rngs
        )
        self.out = linear(c.width, c.width)

    def __call__(
        self, x: Array, shared: L.PassInputs, ancestry: Ancestry, memory: R.RecurrentState, earlier: R.Updates | None
    ) -> tuple[Array, R.Updates]:
        """Return the output, like x [B, T', D], and the inputs b * x of the T tokens of the pass."""
        count = shared.positions.shape[1]
        input_gate, output_gate, values = jnp.split(
            shared.place(L.isolated(self.input(x))[:, :count], "data", None, None), 3, -1
        )
        inputs = input_gate * values
        past = ancestry.past_inputs(memory.window, None if earlier is None else earlier.inputs, inputs)
        y = output_gate.astype(jnp.float32) * self.convolution([*past, inputs])
        return shared.sum(self.out(pad_tokens(y.astype(x.dtype), x.shape[1])), "heads"), R.Updates(inputs)
