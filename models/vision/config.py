"""Shapes and constants of models that read images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np

from specjax.models.decoder import DecoderConfig
from specjax.models.llama import LlamaConfig

Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "silu"]
V = TypeVar("V", bound="VisionLanguageConfig")


@dataclass(frozen=True)
class TowerSizes:
    """Shapes of an image tower. It reads square images of `image_size`, or with `merge` images of any size."""

    width: int = 1152
    num_layers: int = 12  # layers that run
    num_heads: int = 16
    mlp_width: int = 3072
    image_size: int = 224
    patch_size: int = 32
    channels: int = 3
    norm_eps: float = 1e-6
    activation: Activation = "gelu_tanh"
    class_vector: bool = False  # CLIP: a learned vector precedes the patches; no connector reads it
    input_norm: bool = False
    output_norm: bool = True
    patch_bias: bool = True
    merge: int = 0  # Qwen2-VL: blocks of merge x merge patches become one vector
    frames: int = 1  # images that a patch spans in time
    gated: bool = False  # Qwen2.5-VL: layers have RMS norms and a gated MLP
    window: int = 0  # Qwen2.5-VL: patches in a row of a window of attention; 0: all layers read the image
    full_layers: tuple[int, ...] = ()  # with windows: layers that read the image
    table_side: int = 0  # Qwen3-VL: rows and columns of a table of positions, stretched over the image; 0: none
    deep_layers: tuple[int, ...] = ()  # Qwen3-VL: the text model also adds the outputs of these layers (DeepStack)
    spare_layers: int = 0  # layers of the file after those that run

    @property
    def side(self) -> int:
        """Return the number of patches in a row or a column of an image."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class ConnectorSizes:
    """Form of the map from the patches of a tower to vectors of the text model.

    With `shuffle` s above 0, blocks of s x s patches are joined to one vector before a linear map. With `pool` s above
    0, they are averaged and normalised before one. Otherwise each patch passes an MLP with one hidden layer.
    """

    shuffle: int = 0
    pool: int = 0
    activation: Activation = "gelu"
    bias: bool = True

    def num_vectors(self, side: int) -> int:
        """Return the number of vectors of an image with `side` x `side` patches."""
        return (side // max(self.shuffle, self.pool, 1)) ** 2


@dataclass(frozen=True)
class AnyResolution:
    """Images as grids of tiles, besides one tile of the complete image."""

    grids: tuple[tuple[int, int], ...]  # rows and columns of tiles
    max_tiles: int = 9  # larger grids are resized to about the patches of so many tiles


@dataclass(frozen=True)
class VisionLanguageConfig(DecoderConfig):
    """A text model with an image tower and a connector. The fields of `DecoderConfig` describe the text model."""

    tower: TowerSizes = TowerSizes()
    connector: ConnectorSizes = ConnectorSizes()
    image_token: int = 0  # the placeholder of an image vector in prompts
    any_resolution: AnyResolution | None = None  # None: an image or a tile has a fixed number of vectors
    borders: tuple[int, ...] = ()  # the tokens before and after the vectors of an image; the first marks it in texts
    sees_ahead: bool = False  # the vectors of an image see each other both ways, in all layers
    sections: tuple[int, ...] = ()  # M-RoPE: frequencies of time, height and width; (): positions have one axis
    interleaved: bool = False  # the frequencies of the axes alternate; False: they are in blocks
    model_type: str = "smolvlm"
    text_type: str = "llama"  # the `model_type` of the text model
    name: str = "vision_language"

    def __post_init__(self):
        super().__post_init__()
        if self.tower.deep_layers:  # the first layers of the text model have other inputs
            object.__setattr__(self, "stacked", False)

    @property
    def frequency_axes(self) -> np.ndarray:
        """Return the axis int[r / 2] of each rotary frequency: 0 time, 1 height, 2 width.

        Interleaved axes alternate as long as height and width have frequencies left. The rest belongs to time.
        """
        if not self.interleaved:
            return np.repeat(np.arange(len(self.sections)), self.sections)
        axes = np.zeros(sum(self.sections), int)
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return axes

    @property
    def vectors_per_tile(self) -> int:
        """Return the number of placeholders of an image, or of a tile of one."""
        return self.connector.num_vectors(self.tower.side)

    @property
    def places_per_tile(self) -> int:
        """Return the largest number of placeholders per tile. Images of any resolution also have the ends of rows."""
        return self.vectors_per_tile + (0 if self.any_resolution is None else self.tower.side)

    def draft_head_config(self, num_layers: int = 1, **changes) -> Any:
        """Return the config of a draft head with layers like those of the text model."""
        text = LlamaConfig(**values_of(self, fields(DecoderConfig)))
        return text.draft_head_config(num_layers, **changes)

    @classmethod
    def around(cls: type[V], text: DecoderConfig, **parts) -> V:
        """Return the config of a text model with a tower and a connector."""
        return cls(**values_of(text, fields(DecoderConfig)), **parts)


def values_of(config: DecoderConfig, shared: Sequence) -> dict:
    """Return the values of these fields of a config, by name."""
    return {field.name: getattr(config, field.name) for field in shared}
