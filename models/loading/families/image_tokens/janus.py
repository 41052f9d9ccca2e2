"""Janus and Janus-Pro: the decoder over texts and codes, without the towers that read and paint pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.image_tokens.janus import JanusConfig
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import ROWS, WIDTH, ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = ("janus",)
GGUF_TYPES = ()

CODE_FIELDS = {
    "num_embeddings": 16_384, "embed_dim": 8, "projection_dim": 2048, "image_token_embed_dim": 2048,
    "num_hidden_layers": 2, "hidden_act": "gelu",
}  # fmt: skip
"""Fields of a vq_config that describe the codes, and their values if it omits them."""

OF_PIXELS = (
    "double_latent", "latent_channels", "in_channels", "base_channels", "channel_multiplier", "num_res_blocks",
    "num_patches", "out_channels", "dropout",
)  # fmt: skip
"""Fields of a vq_config that describe the encoder and the decoder of pixels."""


def config_from_hf(hf: ConfigFields, **options) -> JanusConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    text = llama.config_from_hf(llama.text_config(hf, {"model_type": "llama"}), **options)
    vq = hf.subfields("vq_config").with_defaults(CODE_FIELDS)
    vq.skip(*OF_PIXELS)
    for name in ("projection_dim", "image_token_embed_dim"):
        if vq.size(name) != text.width:
            raise UsageError(
                f"{hf.where} has {vq.prefix}{name} {vq.size(name)}, which must be the hidden_size {text.width} of the "
                "text model"
            )
    if vq.size("num_hidden_layers") != 2 or vq.text("hidden_act") != "gelu":
        raise UsageError(
            f"{hf.where} has an aligner of {vq.size('num_hidden_layers')} layers with {quote(vq.text('hidden_act'))}, "
            "which specjax does not support (only 2 with gelu)"
        )
    shape = {field.name: getattr(text, field.name) for field in dataclasses.fields(text)}
    codes = vq.size("num_embeddings", maximum=ROWS)
    changes: dict[str, Any] = {
        "vocab_size": text.vocab_size + codes,
        "text_vocab": text.vocab_size,
        "code_width": vq.size("embed_dim", maximum=WIDTH),
        "tied": hf.flag("tie_word_embeddings", True),  # the flag of the whole model counts
    }
    return JanusConfig(**shape | changes)


def stored_hf(config: JanusConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    modules = {
        "aligner.up": "generation_aligner.fc1", "aligner.down": "generation_aligner.hidden_layers.0",
        "code_head.up": "generation_head.proj_out", "code_head.down": "generation_head.vision_head",
    }  # fmt: skip
    mlps = {
        f"{path}.{part}": StoredTensor(f"model.{name}.{part}")
        for path, name in modules.items()
        for part in ("weight", "bias")
    }
    table = {"code_table.weight": StoredTensor("model.generation_embeddings.weight")}
    return llama.stored_hf(config.as_llama(), "llama") | mlps | table
