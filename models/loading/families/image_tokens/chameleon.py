"""Chameleon, Anole and Lumina-mGPT: the decoder over texts and codes, without the encoder of pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.image_tokens.chameleon import ChameleonConfig
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = ("chameleon",)
GGUF_TYPES = ()

SKIPPED = "model_type", "model_parallel_size", "mask_image_logits", "dropout", "z_loss_weight"
"""Fields about training, and the one that hides all codes in the code of Lumina-mGPT, as processors do here."""

FIELDS = {
    "vocab_size": 65_536, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Fields that a config may omit, as in the class of transformers, and that differ from those of Llama."""


def config_from_hf(hf: ConfigFields, **options) -> ChameleonConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf.skip(*SKIPPED)
    text = dataclasses.replace(hf, values={**hf.values, "model_type": "llama"}).with_defaults(FIELDS)
    decoder = llama.config_from_hf(text, **options)
    shape = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)}
    changes: dict[str, Any] = {"qk_layer_norm": True, "norms": "after" if hf.flag("swin_norm") else "before"}
    return ChameleonConfig(**shape | changes)


def stored_hf(config: ChameleonConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    layer = "model.layers.*."
    norms = {
        f"layers.*.attention.{part}_norm.{kind}": StoredTensor(f"{layer}self_attn.{part}_norm.{kind}", flat=True)
        for part in "qk"
        for kind in ("weight", "bias")
    }
    swin_norms = {
        "layers.*.attention_post_norm.weight": StoredTensor(f"{layer}input_layernorm.weight"),
        "layers.*.mlp_post_norm.weight": StoredTensor(f"{layer}post_attention_layernorm.weight"),
    }
    return llama.stored_hf(config.as_llama(), "llama") | norms | (swin_norms if config.norms == "after" else {})
