"""Fields and tensor names that the families of Qwen with images share: towers for images of any size, and M-RoPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.decoder import DecoderConfig
from specjax.models.loading.families import llama, rope
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.model_classes import PREFIXES as CLASSES
from specjax.models.loading.families.vision import common
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import TowerSizes, VisionLanguageConfig
from specjax.models.vision.grid_tower import ROPE_BASE

OTHER_INPUTS = (
    "vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id", "in_chans",
    "spatial_patch_size", "tokens_per_second", "out_hidden_size",
)  # fmt: skip
"""Fields of videos, those that other fields state too, and those that the tensors show."""

PREFIXES = "visual.", "model.visual."
"""Beginnings of the names of a tower, in files of different versions of transformers."""


class GridFamily(NamedTuple):
    """A family of Qwen is described by the properties in which it differs from the others."""

    model_type: str
    text_type: str  # the `model_type` of a language model with the same layers
    text_fields: Mapping[str, Any]  # values of fields that a config may omit, as in the classes of transformers
    tower_fields: Mapping[str, Any]
    rope_base: float  # of a config without one
    sections: tuple[int, int, int]  # the same
    sublayers: Mapping[str, str]  # modules of a layer of the tower, and their names in files
    merger: Mapping[str, str]  # modules of the connector, and their names in files
    interleaved: bool = False
    width_field: str = "hidden_size"  # of the tower

    def config(
        self, hf: ConfigFields, tower: Callable[[ConfigFields], TowerSizes], **options: Any
    ) -> VisionLanguageConfig:
        """Build a config from a config.json.

        Args:
          tower: a function that returns the shapes of the tower from the fields of its part of the file.
          options: dtype, cache_dtype, name, and those of `storage_options`.
        """
        hf.skip(*OTHER_INPUTS)
        fields = hf.subfields("text_config") if hf.has("text_config") else hf
        tied = any([part.flag("tie_word_embeddings") for part in (fields, hf)])  # a list, because both are read
        text = self._text(fields, **options)
        return VisionLanguageConfig.around(
            dataclasses.replace(text, tied=tied),
            tower=tower(hf.subfields("vision_config").with_defaults(self.tower_fields)),
            sections=self._sections(fields, text.head_dim),
            interleaved=self.interleaved,
            image_token=common.image_token(hf, 151_655, text),
            model_type=self.model_type,
            text_type=self.text_type,
        )

    def _text(self, fields: ConfigFields, **options: Any) -> DecoderConfig:
        """Return the config of the text model, which is one of `text_type` with other defaults."""
        fields.skip("model_type")
        values = {**fields.values, fields.prefix + "model_type": self.text_type}
        has_base = fields.has("rope_theta") or fields.has("rope_parameters")
        base = {} if has_base else {"rope_theta": self.rope_base}
        text = dataclasses.replace(fields, values=values).with_defaults({**self.text_fields, **base})
        return llama.config_from_hf(text, **options)

    def _sections(self, fields: ConfigFields, head_dim: int) -> tuple[int, ...]:
        """Return the number of frequencies of each axis.

        Raises: UsageError if they are not those of a head, or in another order than that of the family.
        """
        blocks = [fields.subfields(name) for name in ("rope_parameters", "rope_scaling")]
        stated = [tuple(block.array("mrope_section", int)) for block in blocks if block.has("mrope_section")]
        sections: tuple[int, ...] = stated[0] if stated else self.sections
        if len(sections) != 3 or sum(sections) != head_dim // 2 or min(sections) < 0:
            raise UsageError(
                f"{fields.where} has mrope_section {list(sections)}, which must be three numbers with the sum "
                f"{head_dim // 2}, half of a head"
            )
        for block in blocks:
            if block.flag("mrope_interleaved", self.interleaved) != self.interleaved:
                raise UsageError(
                    f"{fields.where} has {block.prefix}mrope_interleaved {str(not self.interleaved).lower()}, which "
                    f"no {CLASSES[self.model_type]} of transformers has; remove the field"
                )
        return sections

    def stored(self, config: VisionLanguageConfig, prefix: str = PREFIXES[0]) -> dict[str, StoredTensor]:
        """Map parameter paths of tower and connector to tensors whose names begin with `prefix`."""
        width, block = config.tower.width, f"{prefix}blocks.*."
        last = "connector.last" if config.tower.deep_layers else "connector"
        stored = {"tower.patch.kernel": StoredTensor(f"{prefix}patch_embed.proj.weight")}
        for part in ("weight", "bias"):
            for path, name in self.sublayers.items():
                stored[f"tower.layers.*.{path}.{part}"] = StoredTensor(f"{block}{name}.{part}")
            for i, path in enumerate("qkv"):
                name = f"{block}attn.qkv.{part}"
                stored[f"tower.layers.*.{path}.{part}"] = StoredTensor(name, first=i * width, rows=3 * width)
            for path, name in self.merger.items():
                stored[f"{last}.{path}.{part}"] = StoredTensor(f"{prefix}merger.{name}.{part}")
        return stored

    def to_hf(self, c: VisionLanguageConfig, **tower: Any) -> dict[str, Any]:
        """Return the fields that `config` reads. `tower`: fields of the tower that only some families have."""
        names = {activation: name for name, activation in common.ACTIVATIONS.items()}
        settings = rope.to_rope_parameters(rope.rotary_to_hf(c.rope_base, c.rope_scaling))
        settings |= {"mrope_section": list(c.sections)}
        settings |= {"mrope_interleaved": True} if self.interleaved else {}
        text = common.to_hf(c)["text_config"]
        text = {name: value for name, value in text.items() if name not in ("rope_theta", "rope_scaling")}
        return {
            "architectures": [f"{CLASSES[self.model_type]}ForConditionalGeneration"],
            "model_type": self.model_type,
            "image_token_id": c.image_token,
            "tie_word_embeddings": c.tied,
            "torch_dtype": c.dtype,
            "text_config": text | {"model_type": f"{self.model_type}_text", "rope_parameters": settings},
            "vision_config": {
                "depth": c.tower.num_layers,
                self.width_field: c.tower.width,
                "hidden_act": names[c.tower.activation],
                "num_heads": c.tower.num_heads,
                "in_channels": c.tower.channels,
                "patch_size": c.tower.patch_size,
                "spatial_merge_size": c.tower.merge,
                "temporal_patch_size": c.tower.frames,
                **tower,
            },
        }

    def tower(self, hf: ConfigFields, **parts: Any) -> TowerSizes:
        """Return the shapes of a tower from the fields of a vision_config. `parts` are those that differ by family."""
        hf.skip(*OTHER_INPUTS)
        settings = hf.subfields("rope_parameters")
        settings.skip("rope_type")
        if settings.number("rope_theta", ROPE_BASE) != ROPE_BASE:
            raise UsageError(
                f"{hf.where} has vision_config.rope_parameters.rope_theta {settings.number('rope_theta'):g}, which "
                f"specjax does not support (only {ROPE_BASE:g})"
            )
        width, heads = hf.size(self.width_field, maximum=WIDTH), hf.size("num_heads", maximum=HEADS)
        if width % (4 * heads):
            raise UsageError(
                f"{hf.where} has vision_config.{self.width_field} {width}, which must be a multiple of four times "
                f"num_heads, {heads}"
            )
        sizes = {
            "width": width,
            "num_layers": hf.size("depth", maximum=LAYERS),
            "num_heads": heads,
            "patch_size": hf.size("patch_size", maximum=common.PIXELS),
            "channels": hf.size("in_channels", maximum=HEADS),
            "frames": hf.size("temporal_patch_size", maximum=HEADS),
            "merge": hf.size("spatial_merge_size", maximum=HEADS),
            "activation": common.activation(hf, "hidden_act", "silu"),
            "patch_bias": False,
        }
        return TowerSizes(**(sizes | parts))


def find_prefix(names: Collection[str]) -> str:
    """Return the beginning of the names of a tower in a file with these tensors."""
    return next((p for p in PREFIXES if f"{p}patch_embed.proj.weight" in names), PREFIXES[0])


def layers_of(hf: ConfigFields, name: str) -> tuple[int, ...]:
    """Return numbers of layers of a tower. Raises: UsageError for other numbers, or another order than ascending."""
    layers, depth = tuple(hf.array(name, int)), hf.size("depth", maximum=LAYERS)
    if list(layers) != sorted(set(layers)) or not all(0 <= layer < depth for layer in layers):
        raise UsageError(
            f"{hf.where} has {hf.prefix}{name} {list(layers)}, which must be layers in ascending order, below depth, "
            f"{depth}"
        )
    return layers


def mlp_width(hf: ConfigFields) -> int:
    """Return the number of hidden units of the MLPs of a tower."""
    return hf.size("intermediate_size", maximum=ROWS)


QWEN2_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
    }
)  # fmt: skip
"""Fields that the text models of Qwen2-VL and Qwen2.5-VL may omit."""
