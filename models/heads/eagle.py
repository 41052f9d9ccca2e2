"""EAGLE-1 and 2, HASS and FSPAD: one decoder layer continues the target's final features.

Li, Wei, Zhang, Zhang: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (ICML 2024),
arXiv 2401.15077; EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (EMNLP 2024), arXiv 2406.16858.
EAGLE-2 and HASS use heads of EAGLE-1.

Rule: z_t = fc[E x_{t+1}; f_t], f^_{t+1} = layer(z)_t, logits = W_o f^_{t+1}. f is the target's feature after its final
norm, so W_o applies to it; the first layer has no norm before its attention. The feature of a committed token is the
target's, that of a drafted token is predicted. EAGLE-1 drafts a static tree, EAGLE-2 the tree of the most likely paths.

FSPAD: Gui et al.: Boosting Lossless Speculative Decoding via Feature Sampling and Partial Alignment Distillation
(2024), arXiv 2408.15562. It is EAGLE-1 with two options. `sampler` replaces z by
z + W_down(SiLU(W_gate E x) * W_up norm(z)), so that the token selects from the state. `split` doubles the width of the
last MLP and repeats its residual. The first half of the output goes to W_o, and the second is the next feature.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the accepted tokens are read with true features at the start of the next draft, in one pass. Embeddings of
the target are scaled as the target does.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import make_attention
from specjax.models.heads.autoregressive import autoregressive
from specjax.models.heads.blocks import DraftVocabulary, embed, run_blocks, unembed
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.image_rows import ImagePairs
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="eagle",
    summary="drafts with a decoder layer that predicts the target's next hidden state from the last and a token",
    paper="Li et al. 2024, arXiv 2401.15077 and 2406.16858; FSPAD: Gui et al. 2024, arXiv 2408.15562",
    options=shared.head_options(length=5),
    cpu_options={"num_tokens": 3},
    wide_tree="eagle2:8x6x60",
    **shared.HEAD,
)


@dataclass(frozen=True)
class EagleConfig:
    """Shapes of an EAGLE-1 head."""

    layer: LlamaConfig  # shape of its layers, as wide as the target
    bias: bool = True  # bias of fc; the heads of LLaMA 3 have none
    embeds: bool = False  # has its own embedding; False: the target's
    vocab_size: int = 0  # of the target
    norms: bool = False  # norms of the embedding, before the first attention and before the output layer
    draft_vocab_size: int = 0  # number of ids that it drafts, with rows of the target's output layer (FR-Spec); 0: all
    sampler: bool = False  # FSPAD's feature sampling
    split: bool = False  # FSPAD's separate outputs for the logits and for feeding back
    taps: tuple[int, ...] = ()

    @property
    def output_width(self) -> int:
        return self.layer.width * (2 if self.split else 1)

    @property
    def norms_input(self) -> bool:
        """Return True if a norm precedes the first attention."""
        return self.norms


class Layer(nnx.Module):
    """A decoder layer. has_norm: with a norm before its attention. outputs: number of output streams."""

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
    """FSPAD's feature sampling: the token's embedding gates an addition to the state."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.mlp = L.GatedMLP(c.width, c.mlp_width, nnx.silu, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array, embedded: Array, step: L.PassInputs) -> Array:
        mlp = self.mlp
        return x + step.sum(mlp.down(mlp.act(mlp.gate(embedded)) * mlp.up(self.norm(x))), "mlp")


class Eagle(nnx.Module):
    """The module of EAGLE-1, a `specjax.models.heads.autoregressive.AutoregressiveModule`."""

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.embed = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.embeds else None
        self.fc = L.Linear(2 * c.width, c.width, bias=config.bias, dtype=c.dtype, rngs=rngs)
        self.sampler = Sampler(c, rngs) if config.sampler else None
        last = lambda i: 2 if config.split and i == c.num_layers - 1 else 1
        layer = lambda i: Layer(c, has_norm=config.norms_input or i > 0, outputs=last(i), rngs=rngs)
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

    def layers(
        self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache, images: ImagePairs | None = None
    ) -> tuple[Array, kv.Pending]:
        x = self.fc(jnp.concatenate([embedded, state], -1))
        if self.sampler is not None:
            x = self.sampler(x, embedded, step)
        if images is not None:
            x = images.put(x)
        return run_blocks(list(self.stack), x, step, cache, self.config.layer)

    def fed_back(self, outputs: Array) -> Array:
        return jnp.split(outputs, 2, -1)[1] if self.config.split else outputs

    def logits(self, outputs: Array, context: Context) -> Array:
        h = jnp.split(outputs, 2, -1)[0] if self.config.split else outputs
        if self.norm is not None:
            h = self.norm(h)
        if self.head is not None and self.vocabulary is not None:
            return self.vocabulary.spread(self.head.logits(h))
        return unembed(h, context)


def of_target(target: LlamaConfig, *, num_layers: int = 1, mlp_width: int | None = None, **changes) -> EagleConfig:
    """Return the shapes that the authors train for a target: one layer like the target's."""
    layer = target.draft_head_config(num_layers, mlp_width=mlp_width or target.mlp_width)
    return EagleConfig(layer, vocab_size=target.vocab_size, **changes)


def eagle_head(config: EagleConfig) -> Head:
    """Return the functions of an EAGLE-1 head."""
    return autoregressive("eagle", Eagle, config)


KIND = HeadKind(
    METHOD, Eagle, eagle_head, of_target, ("num_layers", "mlp_width"),
    flags=("bias", "norms", "embeds", "sampler", "split"),
)  # fmt: skip
