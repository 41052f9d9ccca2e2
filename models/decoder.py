"""The decoder of all model families: attention and a gated MLP per layer, with family features as options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.experts.counting import PassHistory, mean_experts, start_history
from specjax.models.experts.feed import MixtureFeed
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.latent.attention import LatentAttention
from specjax.models.latent.sizes import LatentSizes
from specjax.models.products import pad_tokens
from specjax.models.rotary import RopeScaling, Rotation, rope_frequencies
from specjax.numerics import reproducible_math
from specjax.numerics.quantized_array import WeightFormat
from specjax.numerics.same_bits import SameBitsError
from specjax.pallas_kernels.gumbel_topk.by_blocks import best_by_blocks
from specjax.types import Appended, Array, Best, Mixture, Output, Stream

UNLIMITED_WINDOW = 1 << 30  # a window wider than any text
QK_LAYER_NORM_EPS = 1e-5  # no config states it

C = TypeVar("C", bound="DecoderConfig")


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of a decoder. Model families are subclasses with their own defaults."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    mlp_widths: tuple[int, ...] | None = None  # per layer, if the layers differ; None: `mlp_width` in all
    experts: MixtureSizes | None = None  # layers have a mixture of experts in place of the MLP
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # number of leading entries of each head that are rotated; None: all
    norm_eps: float = 1e-5
    tied: bool = True  # the output head is the embedding
    qkv_bias: bool = False
    key_bias: bool = True  # with `qkv_bias`, keys have a bias too
    qk_norm: bool = False
    qk_norm_scope: Literal["head", "projection"] = "head"  # "projection": over all heads together
    qk_layer_norm: bool = False  # q/k norms are layer norms of heads, and each head has a weight and a bias of its own
    norms: Literal["before", "after", "both"] = "before"  # position of the norms of a sublayer
    activation: Literal["silu", "gelu"] = "silu"  # "gelu": approximated by tanh
    window: int | None = None  # width of sliding-window attention
    is_global: tuple[bool, ...] | None = None  # per layer: full attention instead of the window; None: in no layer
    local_rope_base: float | None = None  # base of windowed layers, without scaling; None: as in global layers
    query_scale: float | None = None  # factor on q.k; None: head_dim ** -0.5
    attention_softcap: float | None = None
    attention_gate: bool = False  # the output of each head is multiplied by the sigmoid of a projection
    keys_are_values: bool = False  # values are the projection of the keys, before its norm and rotation
    value_norm: bool = False  # values are normalised per head, without a weight
    out_bias: bool = False  # the projection of the output of attention has a bias
    latent: LatentSizes | None = None  # of latent attention, whose `head_dim` counts cached numbers, of one head
    sinks: bool = False  # each head has one more score in its softmax, whose weight is dropped
    logit_softcap: float | None = None
    scales_embedding: bool = False  # multiply embeddings by the square root of the width
    max_positions: int = 8192
    dtype: str = "float32"
    cache_dtype: str | None = None  # "int8": one scale per token and head; "gear:4": `models.gear`; both lossy
    cache_lanes: int = 1  # the cache pads heads to a multiple of this; 128 on TPU
    cache_bits: bool = False  # the cache stores bfloat16 as uint16, which XLA on CPU writes in place
    same_bits: bool = False  # bfloat16 only: a token's logits do not depend on its pass, docs/same_bits.md
    stacked: bool = False  # layers are stacked and scanned, not unrolled
    joined: tuple[str, ...] = ()  # keys of `storage.JOINED`: "qkv", "gate_up" are one matrix each
    quantized: tuple[tuple[str, WeightFormat | None], ...] = ()  # formats by module path (models/storage/schemes.py)
    name: str = "decoder"

    def __post_init__(self):
        if self.mlp_widths is not None and (self.stacked or len(self.mlp_widths) != self.num_layers):
            raise UsageError(
                f"mlp_widths are {len(self.mlp_widths)} numbers for separate layers, but {self.name} has "
                f"{self.num_layers} {'stacked' if self.stacked else 'separate'} ones; set stacked=False, and one width "
                "per layer"
            )

        if self.qk_layer_norm and self.same_bits:
            raise SameBitsError(f"does not hold for {self.name}, because its layer norms have no reproducible form")
        if self.experts is not None:
            self.experts.check_groups(self.name)
            if self.experts.dense_layers:  # layers differ
                object.__setattr__(self, "stacked", False)
            if self.same_bits:
                reason = "sums over experts were not shown to have the same bits in every program"
                raise SameBitsError(f"does not hold for {self.name}, because its {reason}")

    @property
    def period(self) -> int:
        """Return the number of entries of `layers` in the parameters of stacked layers, which repeat."""
        return 1

    def kind_of(self, layer: int) -> Hashable:
        """Return a key that is equal for separate layers whose modules are equal but for their weights."""
        is_dense = self.experts is None or layer in self.experts.dense_layers
        return self.widths_of_mlps()[layer], is_dense

    def attention_settings(self, positions: Array) -> L.AttentionSettings:
        """Return the rotation at positions int32[B, T] and the windows, which a pass computes once for all layers."""
        size = self.rotary_dim or self.head_dim
        rotation_at = functools.partial(Rotation.at, positions, same_bits=self.same_bits)
        amplitude = None if self.rope_scaling is None else self.rope_scaling.amplitude
        frequencies = rope_frequencies(size, self.rope_base, self.rope_scaling, self.max_positions)
        full = rotation_at(frequencies, None if amplitude == 1.0 else amplitude)
        if self.is_global is None or self.window is None:
            return L.AttentionSettings(full, self.window)
        local = full if self.local_rope_base is None else rotation_at(rope_frequencies(size, self.local_rope_base))
        return L.AttentionSettings(
            jax.tree.map(lambda *parts: jnp.stack(parts), local, full),
            jnp.array([self.window, UNLIMITED_WINDOW]),
            np.array(self.is_global, np.int32),
        )

    def widths_of_mlps(self) -> tuple[int, ...]:
        """Return the number of hidden units of each layer's MLP."""
        return self.mlp_widths or (self.mlp_width,) * self.num_layers

    def draft_head_config(self: C, num_layers: int = 1, **changes) -> C:
        """Return the config of a draft head with layers like these.

        The layers are identical, unstacked and have norms before each sublayer. Features that checkpoints of heads
        cannot express are off.
        """
        mixed = self.is_global is not None
        uniform: dict[str, Any] = {
            "norms": "before", "qk_norm_scope": "head", "is_global": None, "local_rope_base": None, "query_scale": None,
            "attention_softcap": None, "window": None if mixed else self.window, "mlp_widths": None,
            "experts": None, "keys_are_values": False, "value_norm": False, "out_bias": False, "sinks": False,
            "latent": None, "qk_layer_norm": False,
        }  # fmt: skip
        if self.latent is not None:  # heads cache keys and values
            uniform |= {"num_kv_heads": self.num_heads, "head_dim": self.latent.value_dim, "rotary_dim": None}
        defaults: dict[str, Any] = {
            "stacked": False,
            "joined": (),
            "quantized": (),
            "cache_dtype": None,
            "same_bits": False,
        }
        return dataclasses.replace(self, num_layers=num_layers, **(uniform | defaults | changes))


def make_attention(
    c: DecoderConfig, *, fan_in: int | None = None, queries_only: bool = False, rngs: nnx.Rngs
) -> L.Attention:
    """Create the attention of a layer, which can also be a `LatentAttention`.

    Args:
      fan_in: its input width, if it differs from the width of the stream.
      queries_only: the layer reads the keys and values of another one.
    """
    if c.latent is not None:
        latent: Any = LatentAttention(c, rngs)
        return latent
    return L.Attention(
        c.width, c.num_heads, c.num_kv_heads, c.head_dim, fan_in=fan_in, bias=c.qkv_bias, key_bias=c.key_bias,
        qk_norm_eps=c.norm_eps if c.qk_norm else None, norms_heads=c.qk_norm_scope == "head", scale=c.query_scale,
        head_layer_norm_eps=QK_LAYER_NORM_EPS if c.qk_layer_norm else None,
        softcap=c.attention_softcap, gated=c.attention_gate, same_bits=c.same_bits, joined="qkv" in c.joined,
        queries_only=queries_only, keys_are_values=c.keys_are_values, value_norm=c.value_norm,
        out_bias=c.out_bias, sinks=c.sinks, dtype=c.dtype, rngs=rngs,
    )  # fmt: skip


def activation_function(c: DecoderConfig):
    """Return the activation function of the MLPs."""
    if c.activation == "silu":
        return reproducible_math.silu if c.same_bits else nnx.silu
    return reproducible_math.gelu if c.same_bits else functools.partial(jax.nn.gelu, approximate=True)


def run_feed(feed: Any, x: Array, shared: L.PassInputs) -> tuple[Array, PassHistory | None]:
    """Run a feed-forward block on x [B, T, D].

    A mixture of experts only reads the tokens of the pass. Tokens that fill a tile would touch other experts.

    Returns: the output, summed over the devices that split the width of the block, and the history after it.
    """
    if isinstance(feed, MixtureFeed):
        y, history = feed.with_history(x[:, : shared.positions.shape[1]], shared.layout, shared.history)
        return pad_tokens(shared.sum(y, "mlp"), x.shape[1]), history
    return shared.sum(feed(x), "mlp"), shared.history


class DecoderBlock(nnx.Module):
    """A decoder layer: attention and MLP, with norms before, after or on both sides of each sublayer."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs, layer: int = 0):
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype, same_bits=c.same_bits)
        pre_norm = lambda: None if c.norms == "after" else norm()
        post_norm = lambda: None if c.norms == "before" else norm()
        self.attention_norm, self.attention_post_norm = pre_norm(), post_norm()
        self.attention = make_attention(c, rngs=rngs)
        self.mlp_norm, self.mlp_post_norm = pre_norm(), post_norm()
        if c.experts is not None and layer not in c.experts.dense_layers:
            self.mlp: Any = MixtureFeed(
                c.width, c.experts, activation_function(c), joined="gate_up" in c.joined, dtype=c.dtype, rngs=rngs
            )
        else:
            self.mlp = L.GatedMLP(
                c.width, c.widths_of_mlps()[layer], activation_function(c), joined="gate_up" in c.joined,
                same_bits=c.same_bits, dtype=c.dtype, rngs=rngs,
            )  # fmt: skip

    def attend(self, x, inputs: L.LayerInputs):
        output, new = self.attention(_normalize(self.attention_norm, x), inputs)
        return _normalize(self.attention_post_norm, output), new

    def keys(self, x, inputs: L.LayerInputs):
        return self.attention.keys(_normalize(self.attention_norm, x), inputs)

    def queries(self, x, shared: L.PassInputs, settings: L.AttentionSettings) -> Array:
        return self.attention.queries(_normalize(self.attention_norm, x), shared, settings)

    def feed(self, x, shared: L.PassInputs):
        return self.feed_with_history(x, shared)[0]

    def feed_with_history(self, x, shared: L.PassInputs):
        y, history = run_feed(self.mlp, _normalize(self.mlp_norm, x), shared)
        return _normalize(self.mlp_post_norm, y), history


def _normalize(norm: L.RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class LanguageModel(nnx.Module):
    """Embedding, layers, final norm and output head, without the pass over the layers."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        """Create the modules. `layers` are those to use; None: create them."""
        c = self.config = config
        self.embed = L.Embedding(c.vocab_size, c.width, same_bits=c.same_bits, dtype=c.dtype, rngs=rngs)
        self.layers = self.make_layers(rngs) if layers is None else layers
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype, same_bits=c.same_bits)
        self.head = (
            None if c.tied else L.Embedding(c.vocab_size, c.width, same_bits=c.same_bits, dtype=c.dtype, rngs=rngs)
        )

    @staticmethod
    def make_layer(config: Any, layer: int, rngs: nnx.Rngs) -> nnx.Module:
        """Create a layer. For stacked layers, `layer` is the place in the repeating group."""
        raise NotImplementedError

    def make_layers(self, rngs: nnx.Rngs) -> Any:
        """Create the layers: one module each, or one per layer of the repeating group with stacked parameters."""
        c = self.config
        if not c.stacked:
            return nnx.List([self.make_layer(c, layer, rngs) for layer in range(c.num_layers)])
        make = lambda member: lambda rngs: self.make_layer(c, member, rngs)
        stack = lambda member: nnx.vmap(make(member), in_axes=0, out_axes=0)(rngs.split(c.num_layers // c.period))
        return nnx.List([stack(member) for member in range(c.period)])

    def embed_tokens(self, tokens: Array | Mixture | Stream, layout=None) -> Array:
        """Return the input [B, T, D] of the first layer."""
        x = tokens.values if isinstance(tokens, Stream) else self.embed(tokens)
        x = x if layout is None else layout.place(x, "data", None, None)
        scaled = self.config.scales_embedding and not isinstance(tokens, Stream)
        return x * jnp.asarray(self.config.width**0.5, x.dtype) if scaled else x

    def predict(self, hidden: Array, layout=None) -> Array:
        """Compute the logits of hidden states [..., D] after the final norm."""
        logits = (self.head or self.embed).logits(hidden)
        return self._capped(logits if layout is None else layout.place_logits(logits))

    def predict_best(self, hidden: Array, k: int) -> Best:
        """Return the `k` best of `predict` on one device, by blocks of the vocabulary."""
        table = self.head or self.embed
        logits_of = lambda part: self._capped(table.product(hidden, part, jnp.float32))
        return best_by_blocks(logits_of, table.weight[...], hidden.shape[:-1], k)

    def _capped(self, logits: Array) -> Array:
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Decoder(LanguageModel):
    """A decoder-only language model: tokens to logits."""

    @staticmethod
    def make_layer(config: DecoderConfig, layer: int, rngs: nnx.Rngs) -> DecoderBlock:
        return DecoderBlock(config, rngs, layer)

    def make_layers(self, rngs: nnx.Rngs) -> Any:
        """Create the layers. Stacked ones are one module, which is not in a list."""
        layers = super().make_layers(rngs)
        return layers[0] if self.config.stacked else layers

    def __call__(
        self, tokens: Array | Mixture | Stream | Appended, cache: kv.KVCache, *, positions: Array, mask: Array,
        taps=(), earlier=None, layers=None, layout=None, run_layers=L.run_layers,
        settings: L.AttentionSettings | None = None,
    ) -> tuple[Output, kv.Pending]:  # fmt: skip
        shared = L.make_pass_inputs(
            positions, mask, cache, earlier, layout, layers, start_history(self.config.experts, tokens)
        )
        x = L.embed_inputs(lambda tokens: self.embed_tokens(tokens, layout), tokens)
        settings = self.config.attention_settings(positions) if settings is None else settings
        stream, pending, history = run_layers(self.layers, x, shared, cache, settings)
        hidden = self.norm(stream[-1])
        read = mean_experts(history, self.config)
        streams = tuple(stream[tap] for tap in taps)
        return Output(self.predict(hidden, layout), hidden, streams, experts=read), pending

    def queries(self, streams: tuple[Array, ...], positions: Array) -> tuple[Array, ...]:
        """Return the queries [B, T, H, h] of each layer, rotated and scaled.

        streams: the residual stream [B, T, D] at the input of each layer.
        """
        layers, settings = self.layers, self.config.attention_settings(positions)
        shared = L.PassInputs(positions, positions, jnp.zeros(()), jnp.zeros(()), None)  # attention is not computed

        def of_layer(i: int, x: Array) -> Array:
            block = layers[i] if isinstance(layers, nnx.List) else L.LayerWeights(*nnx.split(layers), i).block()
            return block.queries(x, shared, settings.at_layer(i))

        return tuple(of_layer(i, x) for i, x in enumerate(streams))
