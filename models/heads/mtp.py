"""Multi-token-prediction modules: decoder layers that checkpoints carry beside the model, trained together with it.

DeepSeek-AI: DeepSeek-V3 Technical Report (2024), arXiv 2412.19437, section 2.2. Qwen3.5, GLM-4.5, MiMo, Ernie 4.5 and
others have modules of the same form. `specjax.models.loading.mtp_dialects` lists their differences.

Rule: z_t = W [norm_e(E x_{t+1}); norm_h(h_t)], o_t = layer(z)_t, logits = W_o norm(o_t) for x_{t+2}. h is the target's
hidden state, W_o and E are the target's own arrays. A drafted token has the module's output, normed, in place of h. A
checkpoint with several modules predicts depth j with module j (`separate_modules`).
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the row of a token has the position of the pair, one less than that of the embedded token. Rotary attention
reads distances alone, so this changes nothing. The zero embedding of vLLM at position 0 is an option, `zero_first`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import DecoderBlock, DecoderConfig
from specjax.models.heads.autoregressive import autoregressive
from specjax.models.heads.blocks import embed, run_blocks, unembed
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.separate_modules import separate_modules
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="mtp",
    summary="drafts with the multi-token-prediction module of the target's own checkpoint",
    paper="DeepSeek-AI 2024, arXiv 2412.19437",
    options=shared.head_options(length=3),
    cpu_options={"num_tokens": 3},
    wide_tree="top:4x2x1",
    **shared.HEAD,
)

Chain = Literal["normed", "raw", "target"]
"""The state of a drafted token: the output after the module's norm, the output itself, or the target's hidden state.

The last is for separate modules only, which then all read the hidden state of the last token of the text.
"""


@dataclass(frozen=True)
class MtpConfig:
    """Shapes and flags of a module, or of several."""

    layer: LlamaConfig  # shape of a module's layer; num_layers: number of modules
    vocab_size: int  # of the target
    target_layers: int  # number of layers of the target
    hidden_first: bool = False  # the projection reads [hidden; embedding]
    hidden: Literal["normed", "raw"] = "normed"  # the target's hidden state: after its final norm, or before
    chained: Chain = "normed"
    final_norm: bool = True  # there is a norm between the layer and the output layer
    own_head: bool = False  # has output layers of its own; False: the target's
    zero_first: bool = False  # the embedding of the first pair of a text is zero

    @property
    def output_width(self) -> int:
        return self.layer.width * self.layer.num_layers

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the streams of the target that the module reads; (): the hidden state after the final norm."""
        return () if self.hidden == "normed" else (self.target_layers,)


class MtpModule(nnx.Module):
    """A module: the norms of both inputs, the projection, a decoder layer, and the norm before the output layer."""

    def __init__(self, config: MtpConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.embedding_norm, self.state_norm = norm(), norm()
        self.fc = L.Linear(2 * c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.stack = nnx.List([DecoderBlock(c, rngs)])
        self.norm = norm() if config.final_norm else None
        self.head = L.Embedding(config.vocab_size, c.width, dtype=c.dtype, rngs=rngs) if config.own_head else None

    def joined(self, embedded: Array, state: Array, positions: Array) -> Array:
        """Return the input [B, T, D] of the layer for pairs at `positions` int32[B, T]."""
        if self.config.zero_first:
            embedded = jnp.where(positions[:, :, None] == 0, 0, embedded)
        parts = [self.embedding_norm(embedded), self.state_norm(state)]
        return self.fc(jnp.concatenate(parts[::-1] if self.config.hidden_first else parts, -1))

    def block(self, x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        """Run the layer: a `specjax.models.heads.blocks.Block`."""
        layer = self.stack[0]
        attended, new = layer.attend(x, inputs)
        x = x + attended
        return x + layer.feed(x, inputs.shared), new

    def embedded(self, tokens: Array, context: Context) -> Array:
        return embed(None, tokens, context).astype(self.config.layer.dtype)

    def fused(self, features: Array) -> Array:
        return features

    def layers(self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache) -> tuple[Array, kv.Pending]:
        x = self.joined(embedded, state, step.positions)
        return run_blocks([self.block], x, step, cache, self.config.layer)

    def fed_back(self, outputs: Array) -> Array:
        return outputs if self.norm is None or self.config.chained != "normed" else self.norm(outputs)

    def logits(self, outputs: Array, context: Context) -> Array:
        normed = outputs if self.norm is None else self.norm(outputs)
        return unembed(normed, context) if self.head is None else self.head.logits(normed)


class MtpModules(nnx.Module):
    """Several modules, one for each depth."""

    def __init__(self, config: MtpConfig, *, rngs: nnx.Rngs):
        self.modules = nnx.List([MtpModule(config, rngs=rngs) for _ in range(config.layer.num_layers)])


def make_modules(config: MtpConfig, *, rngs: nnx.Rngs) -> MtpModule | MtpModules:
    """Create the module of a head, or its modules."""
    return (MtpModule if config.layer.num_layers == 1 else MtpModules)(config, rngs=rngs)


def layer_of(target: DecoderConfig, **changes) -> LlamaConfig:
    """Return the config of a module's layer, like the attention layers of a target, which may be a hybrid."""
    fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(DecoderConfig)}
    return LlamaConfig(**fields | {"stacked": False}).draft_head_config(**changes)


def of_target(
    target: DecoderConfig,
    *,
    num_layers: int = 1,
    mlp_width: int | None = None,
    hidden: Literal["normed", "raw"] = "normed",
    **changes,
) -> MtpConfig:
    """Return the shapes of DeepSeek's modules for a target: one layer like the target's in each.

    num_layers: number of modules. changes: flags of `MtpConfig`.
    """
    layer = layer_of(target, num_layers=num_layers, mlp_width=mlp_width or target.mlp_width)
    return MtpConfig(layer, target.vocab_size, target.num_layers, hidden=hidden, **changes)


def mtp_head(config: MtpConfig) -> Head:
    """Return the functions of a module, which is reused for each depth, or of several."""
    if config.layer.num_layers > 1:
        return separate_modules("mtp", make_modules, config)
    return autoregressive("mtp", make_modules, config)


KIND = HeadKind(
    METHOD, make_modules, mtp_head, of_target, ("num_layers", "mlp_width"), flags=("final_norm", "zero_first"),
    choices=(("hidden", ("normed", "raw")), ("chained", ("normed", "raw"))),
)  # fmt: skip
