"""LLaVA-OneVision: a SigLIP tower, images as grids of tiles, an MLP over each patch, and a text model of Qwen2."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.vision import common, llava
from specjax.models.loading.families.vision.gemma3_vision import pooling_head_names
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import AnyResolution, ConnectorSizes, TowerSizes, VisionLanguageConfig

HF_TYPES = ("llava_onevision",)
GGUF_TYPES = ()

TOWER_FIELDS = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14, "layer_norm_eps": 1e-6,
}  # fmt: skip
"""Fields of the tower of a config.json without a vision_config."""

SIGLIP_FIELDS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6,
}  # fmt: skip
"""Fields that a vision_config may omit, as in the class of transformers."""

LARGEST_GRID = 6  # tiles in a row or a column
ROW_ENDS = "image_newline", "model.image_newline"
"""Names of the vector that ends a row, in files of different versions of transformers."""


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf.skip("video_token_index", "video_token_id", "use_image_newline_parameter")
    text, text_type = common.text_config(hf, {"model_type": "qwen2"}, **options)
    vision = hf.subfields("vision_config")
    kind = vision.text("model_type", "siglip_vision_model")
    if kind != "siglip_vision_model":
        raise UsageError(f"{hf.where} has the image tower {quote(kind)}, which specjax does not support (only SigLIP)")
    vision.skip("vision_use_head")
    vision = vision.with_defaults(SIGLIP_FIELDS if vision.values else TOWER_FIELDS)
    layers = vision.size("num_hidden_layers")
    taken = llava.taken_layers(hf, layers, -1, "full")
    tower = common.tower_sizes(vision, num_layers=taken, spare_layers=layers - taken, output_norm=False)
    connector = ConnectorSizes(
        activation=common.activation(hf, "projector_hidden_act", "gelu"),
        bias=hf.flag("multimodal_projector_bias", True),
    )
    return VisionLanguageConfig.around(
        dataclasses.replace(text, tied=text.tied or hf.flag("tie_word_embeddings")),
        tower=tower,
        connector=connector,
        any_resolution=_any_resolution(hf, tower),
        image_token=common.image_token(hf, 151_646, text),
        model_type="llava_onevision",
        text_type=text_type,
    )


def _any_resolution(hf: ConfigFields, tower: TowerSizes) -> AnyResolution:
    """Return the grids of tiles that a config states. Raises: UsageError for others than whole tiles."""
    sides = range(1, LARGEST_GRID + 1)
    default = [[rows * tower.image_size, columns * tower.image_size] for rows in sides for columns in sides]
    stated = hf.value("image_grid_pinpoints")
    points = default if stated is None else stated
    is_point = lambda point: (
        isinstance(point, list | tuple)
        and len(point) == 2
        and all(type(x) is int and 0 < x <= common.PIXELS and x % tower.image_size == 0 for x in point)
    )
    if not isinstance(points, list) or not points or not all(map(is_point, points)):
        raise UsageError(
            f"{hf.where} has image_grid_pinpoints that are not heights and widths in multiples of "
            f"{tower.image_size}, the side of a tile; download the file again"
        )
    form = hf.text("vision_aspect_ratio", "anyres_max_9")
    match = re.fullmatch("anyres_max_([1-9][0-9]?)", form)
    if match is None:
        raise UsageError(
            f"{hf.where} has vision_aspect_ratio {quote(form)}, which specjax does not support (only anyres_max_ with "
            "a number)"
        )
    grids = tuple((height // tower.image_size, width // tower.image_size) for height, width in points)
    return AnyResolution(grids, int(match[1]))


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    text = common.text_names(config, "model.")
    return {**text, **_image_names(llava.PREFIXES[0], llava.PROJECTORS[0], ROW_ENDS[0])}


def variant_hf(config: VisionLanguageConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths of tower and connector in a file of another version of transformers."""
    first = lambda choices, name: next((p for p in choices if p + name in names), choices[0])
    return _image_names(
        first(llava.PREFIXES, "embeddings.patch_embedding.weight"), first(llava.PROJECTORS, "linear_1.weight"),
        first(ROW_ENDS, ""),
    )  # fmt: skip


def _image_names(prefix: str, projector: str, row_end: str) -> dict[str, StoredTensor]:
    return llava.image_names(prefix, projector) | {"connector.row_end.vector": StoredTensor(row_end)}


def unused_hf(config: VisionLanguageConfig) -> frozenset[str]:
    """Return the names of tensors that checkpoints have, and that no pass reads."""
    return common.spare_names(config, llava.PREFIXES, ("post_layernorm",)) | pooling_head_names(llava.PREFIXES)


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    fields, size = llava.config_to_hf(c), c.tower.image_size
    assert c.any_resolution is not None
    return fields | {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "vision_config": fields["vision_config"] | {"model_type": "siglip_vision_model"},
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": [[rows * size, columns * size] for rows, columns in c.any_resolution.grids],
        "vision_aspect_ratio": f"anyres_max_{c.any_resolution.max_tiles}",
    }
