"""EAGLE-1 (whose weights EAGLE-2 and HASS share): one decoder layer that continues the target's final features.

Li, Wei, Zhang, Zhang: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (ICML 2024),
arXiv 2401.15077. z_t = fc[E x_{t+1}; f_t], f^_{t+1} = layer(z)_t, logits = W_o f^_{t+1}. f is the feature behind the
target's final norm, so W_o applies to it; the layer has no norm before its attention.

FSPAD: Gui et al.: Boosting Lossless Speculative Decoding via Feature Sampling and Partial Alignment
Distillation (2024), arXiv 2408.15562, is EAGLE-1 with two options. `sampler`: z + W_down(SiLU(W_gate E x) *
W_up norm(z)) in place of z, so that the token selects from the state. `split`: the last MLP is twice as wide, its
residual doubled; the first half of what it says goes to W_o, the second is the next feature.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.heads.autoregressive import autoregressive
from specjax.models.heads.blocks import DraftVocabulary, embed, run_blocks, unembed
from specjax.models.heads.contract import Head
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class EagleConfig:
    """Shapes of an EAGLE-1 head."""

    layer: LlamaConfig  # of its layers; of the target's width
    bias: bool = True  # of fc; the heads of LLaMA 3 have none
    embeds: bool = False  # has an embedding of its own, in place of the target's
    vocab_size: int = 0  # of the target
    norms: bool = False  # of the embedding, before the first layer's attention and before the head
    draft_vocab_size: int = 0  # ids that it drafts by rows of the target's head (FR-Spec); 0: all
    sampler: bool = False  # FSPAD's; published as `fc.mlp.*` and `fc.post_attention_layernorm`, fc as `fc.fc.*`
    split: bool = False  # FSPAD's: one half of the output for the logits, one to feed back
    taps: tuple[int, ...] = ()

    @property
    def said(self) -> int:
        return self.layer.width * (2 if self.split else 1)


class Layer(nnx.Module):
    """A decoder layer; the first of a head has no norm before its attention. outputs: how many streams it gives."""

    def __init__(self, c: LlamaConfig, *, has_norm: bool, outputs: int = 1, rngs: nnx.Rngs):
        self.attention_norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype) if has_norm else None
        self.attention = make_attention(c, rngs=rngs)
        self.mlp_norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.mlp = L.GatedMLP(c.width, c.mlp_width, nnx.silu, dtype=c.dtype, rngs=rngs)
        self.outputs = outputs
        if outputs > 1:
            self.mlp.down = L.Linear(c.mlp_width, outputs * c.width, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        attended, new = self.attention(x if self.attention_norm is None else self.attention_norm(x), inputs)
        x = x + attended
        residual = jnp.concatenate([x] * self.outputs, -1)
        return residual + inputs.shared.sum(self.mlp(self.mlp_norm(x)), "mlp"), new


class Sampler(nnx.Module):
    """FSPAD's feature sampling: the token's embedding gates what is added to the joined state."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.mlp = L.GatedMLP(c.width, c.mlp_width, nnx.silu, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array, embedded: Array, step: L.PassInputs) -> Array:
        mlp = self.mlp
        return x + step.sum(mlp.down(mlp.act(mlp.gate(embedded)) * mlp.up(self.norm(x))), "mlp")


class Eagle(nnx.Module):
    """A `specjax.models.heads.autoregressive.AutoregressiveModule`."""

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        self.fc = L.Linear(2 * c.width, c.width, bias=config.bias, dtype=c.dtype, rngs=rngs)
        self.sampler = Sampler(c, rngs) if config.sampler else None
        last = lambda i: 2 if config.split and i == c.num_layers - 1 else 1
        layer = lambda i: Layer(c, has_norm=config.norms or i > 0, outputs=last(i), rngs=rngs)
        self.stack = nnx.List([layer(i) for i in range(c.num_layers)])
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype) if config.norms else None
        self.embedding_norm, self.norm = norm(), norm()
        size = config.draft_vocab_size
        self.head = L.Embedding(size, c.width, dtype=c.dtype, rngs=rngs) if size else None
        self.vocabulary = DraftVocabulary(config.vocab_size, size) if size else None

    def embedded(self, tokens: Array, context: Context) -> Array:
        x = embed(self.embed, tokens, context).astype(self.config.layer.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def fused(self, features: Array) -> Array:
        return features

    def layers(self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        x = self.fc(jnp.concatenate([embedded, state], -1))
        if self.sampler is not None:
            x = self.sampler(x, embedded, step)
        return run_blocks(list(self.stack), x, step, cache, self.config.layer)

    def fed_back(self, said: Array) -> Array:
        return jnp.split(said, 2, -1)[1] if self.config.split else said

    def logits(self, said: Array, context: Context) -> Array:
        if self.config.split:
            said = jnp.split(said, 2, -1)[0]
        if self.norm is not None:
            said = self.norm(said)
        if self.head is not None and self.vocabulary is not None:
            return self.vocabulary.spread(self.head.logits(said))
        return unembed(said, context)


def of_target(target: LlamaConfig, **changes) -> EagleConfig:
    """The shapes that the authors train for a target: a layer like its own."""
    return EagleConfig(target.draft_head_config(**changes))


def eagle_head(config: EagleConfig) -> Head:
    """The functions of an EAGLE-1 head."""
    return autoregressive("eagle", Eagle, config)
