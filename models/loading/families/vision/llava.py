"""LLaVA-1.5: a CLIP tower without its last layer, an MLP over each patch, and a text model of the Llama family."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.vision import common
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import ConnectorSizes, VisionLanguageConfig

HF_TYPES = ("llava",)
GGUF_TYPES = ()

CLIP_FIELDS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu",
}  # fmt: skip
"""Fields that a vision_config may omit, as in the class of transformers."""

TOWER_FIELDS = CLIP_FIELDS | {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""The same for a config.json without a vision_config."""

PREFIXES = "vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower."
"""Beginnings of the names of a tower, in files of different versions of transformers."""

PROJECTORS = "multi_modal_projector.", "model.multi_modal_projector."


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    text, text_type = common.text_config(hf, {}, **options)
    vision = hf.subfields("vision_config")
    kind = vision.text("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        raise UsageError(f"{hf.where} has the image tower {quote(kind)}, which specjax does not support (only CLIP)")
    vision = vision.with_defaults(CLIP_FIELDS if vision.values else TOWER_FIELDS)
    layers = vision.size("num_hidden_layers")
    taken = taken_layers(hf, layers, -2, "default")
    tower = common.tower_sizes(
        vision, num_layers=taken, spare_layers=layers - taken, class_vector=True, input_norm=True, output_norm=False,
        patch_bias=False,
    )  # fmt: skip
    connector = ConnectorSizes(
        activation=common.activation(hf, "projector_hidden_act", "gelu"),
        bias=hf.flag("multimodal_projector_bias", True),
    )
    hf.skip("image_seq_length")
    return VisionLanguageConfig.around(
        dataclasses.replace(text, tied=text.tied or hf.flag("tie_word_embeddings")),
        tower=tower,
        connector=connector,
        image_token=common.image_token(hf, 32_000, text),
        model_type="llava",
        text_type=text_type,
    )


def taken_layers(hf: ConfigFields, layers: int, default: int, supported: str) -> int:
    """Return the number of layers of the tower that run. Raises: UsageError for other outputs than one layer's.

    default: the layer of a config that states none. supported: the only selection of vectors that exists.
    """
    layer, strategy = hf.value("vision_feature_layer"), hf.text("vision_feature_select_strategy", supported)
    layer = default if layer is None else layer
    if type(layer) is not int or not -layers - 1 <= layer <= layers:
        raise UsageError(
            f"{hf.where} has vision_feature_layer {quote(layer)}, which must be one layer of the {layers} of its tower"
        )
    if strategy != supported:
        raise UsageError(
            f"{hf.where} has vision_feature_select_strategy {quote(strategy)}, which specjax does not support (only "
            f"{supported})"
        )
    return layer % (layers + 1)


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    return {**common.text_names(config, "model."), **image_names(PREFIXES[0], PROJECTORS[0])}


def variant_hf(config: VisionLanguageConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths of tower and connector in a file of another version of transformers."""
    prefix = next((p for p in PREFIXES if f"{p}embeddings.class_embedding" in names), PREFIXES[0])
    projector = next((p for p in PROJECTORS if f"{p}linear_1.weight" in names), PROJECTORS[0])
    return image_names(prefix, projector)


def image_names(prefix: str, projector: str) -> dict[str, StoredTensor]:
    """Map the paths of tower and connector to names with these beginnings."""
    parts = {"up": "linear_1", "down": "linear_2"}
    connector = {
        f"connector.{part}.{kind}": StoredTensor(f"{projector}{name}.{kind}")
        for part, name in parts.items()
        for kind in ("weight", "bias")
    }
    return common.tower_names(prefix, {"input_norm": "pre_layrnorm"}) | connector


def unused_hf(config: VisionLanguageConfig) -> frozenset[str]:
    """Return the names of tensors that checkpoints have, and that no pass reads."""
    return common.spare_names(config, PREFIXES, ("post_layernorm",))


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    names = {activation: name for name, activation in common.ACTIVATIONS.items()}
    fields = common.to_hf(c)
    return fields | {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": fields["vision_config"] | {"model_type": "clip_vision_model"},
        "image_token_index": c.image_token,
        "projector_hidden_act": names[c.connector.activation],
        "multimodal_projector_bias": c.connector.bias,
        "vision_feature_layer": c.tower.num_layers,
        "vision_feature_select_strategy": "default",
    }
