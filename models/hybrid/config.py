"""Configuration of hybrid decoders: the kind of each layer, and the sizes of its mixers."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from specjax.errors import UsageError
from specjax.models.decoder import DecoderConfig
from specjax.models.layers import AttentionSettings
from specjax.models.llama import LlamaConfig
from specjax.numerics.same_bits import SameBitsError
from specjax.types import Array

Mixer = Literal[
    "attention", "latent_attention", "gated_delta", "mamba2", "short_convolution", "attention_and_mamba2", "none"
]
Feed = Literal["gated", "relu2", "moe", "none"]

RECURRENT_MIXERS = "gated_delta", "mamba2", "short_convolution", "attention_and_mamba2"
ATTENTION_MIXERS = "attention", "latent_attention", "attention_and_mamba2"


class LayerKind(NamedTuple):
    """Sublayers of one layer, and the fields of the config that differ in it."""

    mixer: Mixer = "attention"
    feed: Feed = "gated"
    changes: tuple[tuple[str, Any], ...] = ()  # names and values of fields of `HybridConfig`
    keys_of: int | None = None  # the layer whose keys and values its attention reads; None: its own

    @property
    def attends(self) -> bool:
        """Return True if the layer has attention."""
        return self.mixer in ATTENTION_MIXERS

    @property
    def has_keys(self) -> bool:
        """Return True if the layer has keys and values of its own."""
        return self.attends and self.keys_of is None

    @property
    def recurs(self) -> bool:
        """Return True if the layer has a recurrent memory."""
        return self.mixer in RECURRENT_MIXERS


class GatedDeltaSizes(NamedTuple):
    """Sizes of a gated delta net. Each key head serves `num_value_heads / num_key_heads` value heads in a row."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4  # taps of the convolution

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class Mamba2Sizes(NamedTuple):
    """Sizes and constants of a Mamba-2 mixer. Each group of B and C serves `num_heads / num_groups` heads in a row."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int = 4  # taps of the convolution
    conv_bias: bool = True
    bias: bool = False  # of the projections of the input
    out_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    has_norm: bool = True  # the output has a norm, which treats each group of heads separately
    norm_before_gate: bool = False
    multipliers: tuple[float, float, float, float, float] | None = None  # factors on z, x, B, C and dt

    @property
    def inner(self) -> int:
        """Return the width of the mixer's output."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim


class LayerInputSizes(NamedTuple):
    """Sizes of the inputs that each layer reads besides the stream (Gemma 4: per-layer embeddings)."""

    width: int  # of one layer's input
    vocab_size: int  # rows of the table of all layers


class Multipliers(NamedTuple):
    """Constant factors of a model with scaled activations."""

    embedding: float = 1.0
    residual: float = 1.0  # on the output of each sublayer
    logits: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0  # on keys, and so on the scores of attention
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    gate: float = 1.0  # on the gate of the MLP, before its activation
    down: float = 1.0  # on the output of the MLP


NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    """Shapes and constants of a hybrid decoder. `head_dim`, `num_heads` and `num_kv_heads` describe its attention.

    If layers differ in their heads, queries, keys and values stay separate, whatever `joined` has.
    """

    kinds: tuple[LayerKind, ...] = ()  # one per layer
    model_type: str = ""  # the `model_type` of its files, which names the family
    gated_delta: GatedDeltaSizes | None = None
    mamba2: Mamba2Sizes | None = None
    convolution_kernel: int = 0  # taps of short convolutions
    convolution_bias: bool = False
    rotates: bool = True  # attention rotates queries and keys by their positions
    multipliers: Multipliers = NO_MULTIPLIERS
    layer_inputs: LayerInputSizes | None = None
    layer_scales: bool = False  # the stream after each layer is multiplied by a number of the checkpoint
    name: str = "hybrid"

    def __post_init__(self):
        super().__post_init__()
        if len(self.kinds) != self.num_layers:
            raise UsageError(
                f"{self.name} has {len(self.kinds)} kinds for {self.num_layers} layers; give one LayerKind per layer"
            )
        if self.same_bits:
            reason = "recurrent layers sum over the tokens of a pass" if self.recurs else "layers have several kinds"
            raise SameBitsError(f"does not hold for {self.name}, because its {reason}")
        if self.norms == "after":
            raise UsageError(f'{self.name} has norms "after" its sublayers only; set norms to "before" or "both"')
        if self.has_own_heads:  # the rows of a joined matrix would differ by layer
            object.__setattr__(self, "joined", tuple(name for name in self.joined if name != "qkv"))
        for layer, kind in enumerate(self.kinds):
            if kind.keys_of is not None and not (kind.keys_of < layer and self.kinds[kind.keys_of].has_keys):
                raise UsageError(
                    f"layer {layer} of {self.name} reads the keys of layer {kind.keys_of}, which must be an earlier "
                    "layer with keys of its own"
                )
        self._check_unread_fields()

    def _check_unread_fields(self) -> None:
        """Check the fields that other decoders read. Raises: UsageError for a value that no layer would read."""
        for name in ("mlp_widths", "is_global"):
            if getattr(self, name) is not None:
                field = "mlp_width" if name == "mlp_widths" else "window"
                raise UsageError(f"{self.name} does not read {name}; set {field} in the changes of each LayerKind")

    @property
    def recurs(self) -> bool:
        """Return True if a layer has a recurrent memory."""
        return any(kind.recurs for kind in self.kinds)

    @property
    def has_own_heads(self) -> bool:
        """Return True if layers differ in their heads, or in the projections of these, or have latent attention."""
        fields = {"head_dim", "num_heads", "num_kv_heads", "keys_are_values"}
        differs = lambda kind: kind.keys_of is not None or bool(fields & dict(kind.changes).keys())
        return self.latent is not None or any(map(differs, self.kinds))

    @property
    def period(self) -> int:
        """Return the smallest number of layers after which the kinds repeat, a divisor of the number of layers."""
        sizes = (size for size in range(1, self.num_layers + 1) if self.num_layers % size == 0)
        return next(size for size in sizes if self.kinds == self.kinds[:size] * (self.num_layers // size))

    def kind_of(self, layer: int) -> LayerKind:
        return self.kinds[layer]

    @property
    def num_members(self) -> int:
        """Return the number of entries of `layers` in the parameters: one per layer of a repeating group if stacked."""
        return self.period if self.stacked else self.num_layers

    @property
    def window_length(self) -> int:
        """Return the number of earlier inputs that convolutions read, the largest of all layers; 0: none has one."""
        layers = (self.of_layer(member) for member in range(self.num_members))
        kernels = ((c.convolution_kernel, *(s.kernel for s in (c.gated_delta, c.mamba2) if s)) for c in layers)
        return max((1, *itertools.chain.from_iterable(kernels))) - 1

    @property
    def shared_keys(self) -> tuple[int, int] | None:
        """Return the last local and the last global layer with keys of its own, for assistants of Gemma 4."""
        if self.recurs or self.window is None:
            return None
        is_global = ["window" in dict(kind.changes) for kind in self.kinds]
        last = lambda full: [i for i, k in enumerate(self.kinds) if k.has_keys and is_global[i] == full][-1:]
        layers = (*last(False), *last(True))
        return (layers[0], layers[1]) if len(layers) == 2 else None

    def place_of_keys(self, layer: int) -> int:
        """Return the place of the keys that a layer reads among those of all layers with keys of their own."""
        source = self.kinds[layer].keys_of
        return sum(kind.has_keys for kind in self.kinds[: layer if source is None else source])

    def attention_settings(self, positions: Array) -> AttentionSettings:
        settings = super().attention_settings(positions)
        return settings if self.rotates else settings._replace(rotation=None)

    def draft_head_config(self, num_layers: int = 1, **changes) -> LlamaConfig:  # type: ignore[override]
        """Return the config of a draft head, whose layers all attend and have no output gate."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(DecoderConfig)}
        window = None if any("window" in dict(kind.changes) for kind in self.kinds) else self.window
        layer = LlamaConfig(**fields | {"stacked": False, "attention_gate": False, "window": window})
        return layer.draft_head_config(num_layers, **changes)

    def of_layer(self, member: int) -> HybridConfig:
        """Return the config of one entry of `layers`, with its own changes."""
        return dataclasses.replace(self, **dict(self.kinds[member].changes))
