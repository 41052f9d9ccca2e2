"""Gemma 3 with images: a SigLIP tower, averages of blocks of patches, and a text model of Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import DecoderConfig
from specjax.models.gemma3 import Gemma3Config
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.gemma import gemma3
from specjax.models.loading.families.vision import common
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import ConnectorSizes, VisionLanguageConfig, values_of

HF_TYPES = ("gemma3",)
GGUF_TYPES = ()

TOWER_FIELDS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6,
}  # fmt: skip
"""Fields that a vision_config may omit, as in the class of transformers."""

PREFIXES = "vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower."
"""Beginnings of the names of a tower, in files of different versions of transformers."""

PROJECTORS = "multi_modal_projector.", "model.multi_modal_projector."

TOWER = tuple(f"{prefix}embeddings.patch_embedding." for prefix in PREFIXES)
"""Beginnings of the names of tensors that files with a tower have."""


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    text = gemma3.config_from_hf(hf, **options)
    vision = hf.subfields("vision_config")
    kind = vision.text("model_type", "siglip_vision_model")
    if kind != "siglip_vision_model":
        raise UsageError(f"{hf.where} has the image tower {quote(kind)}, which specjax does not support (only SigLIP)")
    vision.skip("vision_use_head")
    tower = common.tower_sizes(vision.with_defaults(TOWER_FIELDS))
    count = hf.size("mm_tokens_per_image", 256, maximum=ROWS)
    side = math.isqrt(count)
    if side**2 != count or tower.side % side:
        raise UsageError(
            f"{hf.where} has mm_tokens_per_image {count}, which must be the square of a number that divides the "
            f"{tower.side} patches in a row of an image"
        )
    borders = (("boi_token_index", 255_999), ("eoi_token_index", 256_000))
    return VisionLanguageConfig.around(
        text,
        tower=tower,
        connector=ConnectorSizes(pool=tower.side // side, bias=False),
        image_token=common.image_token(hf, 262_144, text),
        borders=tuple(hf.size(name, default, minimum=0, maximum=text.vocab_size - 1) for name, default in borders),
        sees_ahead=True,
        model_type="gemma3",
        text_type="gemma3_text",
    )


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    text = gemma3.stored_hf(_text_part(config), config.text_type)
    return {**text, **_image_names(PREFIXES[0], PROJECTORS[0])}


def variant_hf(config: VisionLanguageConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths of tower and connector in a file of another version of transformers."""
    prefix = next((p for p in PREFIXES if f"{p}embeddings.patch_embedding.weight" in names), PREFIXES[0])
    projector = next((p for p in PROJECTORS if f"{p}mm_input_projection_weight" in names), PROJECTORS[0])
    return _image_names(prefix, projector)


def _image_names(prefix: str, projector: str) -> dict[str, StoredTensor]:
    return {
        **common.tower_names(prefix, {"output_norm": "post_layernorm"}),
        "connector.norm.weight": StoredTensor(f"{projector}mm_soft_emb_norm.weight", add=1.0),
        "connector.kernel": StoredTensor(f"{projector}mm_input_projection_weight"),
    }


def unused_hf(config: VisionLanguageConfig) -> frozenset[str]:
    """Return the names of tensors that checkpoints have, and that no pass reads."""
    return common.spare_names(config, PREFIXES, ()) | pooling_head_names(PREFIXES)


def pooling_head_names(prefixes: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors of SigLIP's pooling head, which no connector reads."""
    names = ("probe", "attention.in_proj_weight", "attention.in_proj_bias")
    modules = ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
    head = (*names, *(f"{module}.{part}" for module in modules for part in ("weight", "bias")))
    return frozenset(f"{prefix}head.{name}" for prefix in prefixes for name in head)


def _text_part(config: VisionLanguageConfig) -> Gemma3Config:
    return Gemma3Config(**values_of(config, fields(DecoderConfig)))


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": c.model_type,
        "text_config": gemma3.config_to_hf(_text_part(c)),
        "vision_config": common.tower_to_hf(c.tower) | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": c.vectors_per_tile,
        "image_token_index": c.image_token,
        "boi_token_index": c.borders[0],
        "eoi_token_index": c.borders[1],
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }
