"""Idefics3 and SmolVLM: a SigLIP tower, blocks of patches joined to vectors, and a text model of the Llama family."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.errors import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.vision import common
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import ConnectorSizes, VisionLanguageConfig

HF_TYPES = ("smolvlm", "idefics3")
GGUF_TYPES = ()

TOWER_FIELDS = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-6,
}  # fmt: skip
"""Fields that a vision_config may omit, as in the class of transformers."""


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    text, text_type = common.text_config(hf, {}, **options)
    tower = common.tower_sizes(hf.subfields("vision_config").with_defaults(TOWER_FIELDS))
    scale = hf.size("scale_factor", 2)
    if tower.side % scale:
        raise UsageError(
            f"{hf.where} has scale_factor {scale}, which must divide the {tower.side} patches in a row of an image"
        )
    # The class of transformers reads the flag of the whole model, not that of its text model.
    text = dataclasses.replace(text, tied=hf.flag("tie_word_embeddings"))
    hf.skip(*common.OF_OTHER_FAMILIES)
    return VisionLanguageConfig.around(
        text,
        tower=tower,
        connector=ConnectorSizes(shuffle=scale, bias=False),
        image_token=common.image_token(hf, 128_257, text),
        model_type=hf.text("model_type"),
        text_type=text_type,
    )


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    return {
        **common.text_names(config, "model.text_model."),
        **common.tower_names("model.vision_model.", {"output_norm": "post_layernorm"}),
        "connector.proj.weight": StoredTensor("model.connector.modality_projection.proj.weight"),
    }


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    prefix = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[c.model_type]
    return common.to_hf(c) | {
        "architectures": [f"{prefix}ForConditionalGeneration"],
        "scale_factor": c.connector.shuffle,
        "image_token_id": c.image_token,
    }
