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
from specjax.types import Array

Mixer = Literal["attention", "gated_delta", "mamba2", "short_convolution", "attention_and_mamba2", "none"]
Feed = Literal["gated", "relu2", "none"]

RECURRENT_MIXERS = "gated_delta", "mamba2", "short_convolution", "attention_and_mamba2"
ATTENTION_MIXERS = "attention", "attention_and_mamba2"


class LayerKind(NamedTuple):
    """Sublayers of one layer, and the fields of the config that differ in it."""

    mixer: Mixer = "attention"
    feed: Feed = "gated"
    changes: tuple[tuple[str, Any], ...] = ()  # names and values of fields of `HybridConfig`

    @property
    def attends(self) -> bool:
        """Return True if the layer has keys and values."""
        return self.mixer in ATTENTION_MIXERS

    @property
    def recurs(self) -> bool:
        """Return True if the layer has a recurrent memory."""
        return self.mixer in RECURRENT_MIXERS

    def heads(self, config: DecoderConfig) -> tuple[int, int, int]:
        """Return the number of query heads, that of key/value heads and the head size in a layer of this kind."""
        names = "num_heads", "num_kv_heads", "head_dim"
        changes = dict(self.changes)
        num_heads, num_kv_heads, size = (changes.get(name, getattr(config, name)) for name in names)
        return num_heads, num_kv_heads, size


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
    """Shapes and constants of a hybrid decoder. `head_dim`, `num_heads` and `num_kv_heads` describe its attention."""

    kinds: tuple[LayerKind, ...] = ()  # one per layer
    model_type: str = ""  # the `model_type` of its files, which names the family
    gated_delta: GatedDeltaSizes | None = None
    mamba2: Mamba2Sizes | None = None
    convolution_kernel: int = 0  # taps of short convolutions
    convolution_bias: bool = False
    rotates: bool = True  # attention rotates queries and keys by their positions
    multipliers: Multipliers = NO_MULTIPLIERS
    name: str = "hybrid"

    def __post_init__(self):
        super().__post_init__()
        if len(self.kinds) != self.num_layers:
            raise UsageError(
                f"{self.name} has {len(self.kinds)} kinds for {self.num_layers} layers; give one LayerKind per layer"
            )
        if self.same_bits:
            raise UsageError(
                f"same_bits does not hold for {self.name}, because its recurrent layers sum over the tokens of a pass; "
                "leave same_bits out"
            )
        self._check_unread_fields()

    def _check_unread_fields(self) -> None:
        """Check the fields that other decoders read. Raises: UsageError for a value that no layer would read."""
        if self.norms != "before":
            raise UsageError(f'{self.name} has norms before its sublayers; leave norms at "before", not "{self.norms}"')
        for name in ("mlp_widths", "is_global"):
            if getattr(self, name) is not None:
                field = "mlp_width" if name == "mlp_widths" else "window"
                raise UsageError(f"{self.name} does not read {name}; set {field} in the changes of each LayerKind")
        heads = {kind.heads(self) for kind in self.kinds if kind.attends}
        if "qkv" in self.joined and len(heads) > 1:
            raise UsageError(
                f"{self.name} has layers with other heads, whose queries, keys and values cannot be joined; leave qkv "
                "out of joined"
            )

    @property
    def period(self) -> int:
        """Return the smallest number of layers after which the kinds repeat, a divisor of the number of layers."""
        sizes = (size for size in range(1, self.num_layers + 1) if self.num_layers % size == 0)
        return next(size for size in sizes if self.kinds == self.kinds[:size] * (self.num_layers // size))

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

    def attention_settings(self, positions: Array) -> AttentionSettings:
        settings = super().attention_settings(positions)
        return settings if self.rotates else settings._replace(rotation=None)

    def draft_head_config(self, num_layers: int = 1, **changes) -> LlamaConfig:  # type: ignore[override]
        """Return the config of a draft head, whose layers all attend and have no output gate."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(DecoderConfig)}
        layer = LlamaConfig(**fields | {"stacked": False, "attention_gate": False})
        return layer.draft_head_config(num_layers, **changes)

    def of_layer(self, member: int) -> HybridConfig:
        """Return the config of one entry of `layers`, with its own changes."""
        return dataclasses.replace(self, **dict(self.kinds[member].changes))
