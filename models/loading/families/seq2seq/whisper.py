"""Whisper: tensor names and configurations of Hugging Face checkpoints."""

from __future__ import annotations

from typing import Any

from specjax.models.loading.families.config_fields import ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.seq2seq.bart import shared_fields, shared_fields_to_hf, shared_names
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.seq2seq.config import WhisperConfig

HF_TYPES = ("whisper",)
GGUF_TYPES = ()
GENERATION_FIELDS = ("decoder_start_token_id",)
"""Fields that generation_config.json may state in place of config.json."""

FIELDS = {
    "vocab_size": 51_865, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "activation_function": "gelu",
    "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80, "scale_embedding": False,
    "tie_word_embeddings": True, "decoder_start_token_id": 50_257,
}  # fmt: skip
"""Fields that a config may omit, as in the class of transformers."""

UNREAD = (
    "use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment",
    "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length",
    "mask_feature_min_masks", "median_filter_width", "suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids",
)  # fmt: skip
"""Fields of training, of other tasks, and those that `specjax.speech` reads."""


def config_from_hf(hf: ConfigFields, **options) -> WhisperConfig:
    """Build a config from the config.json of Whisper.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = hf.with_defaults(FIELDS)
    hf.skip(*UNREAD)
    positions = hf.size("max_target_positions", maximum=ROWS)
    return WhisperConfig(
        **shared_fields(hf), key_bias=False, max_positions=positions, text_positions=positions,
        source_positions=hf.size("max_source_positions", maximum=ROWS),
        mel_bins=hf.size("num_mel_bins", maximum=WIDTH), **options,
    )  # fmt: skip


def stored_hf(config: WhisperConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    names = shared_names() | {"embed.weight": "model.decoder.embed_tokens.weight", "head.weight": "proj_out.weight"}
    for part in ("weight", "bias"):
        names |= {
            f"norm.{part}": f"model.decoder.layer_norm.{part}",
            f"encoder_norm.{part}": f"model.encoder.layer_norm.{part}",
            f"encoder_conv1.{part}": f"model.encoder.conv1.{part}",
            f"encoder_conv2.{part}": f"model.encoder.conv2.{part}",
        }
    return {path: StoredTensor(name) for path, name in names.items()}


def config_to_hf(c: WhisperConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    return {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", **shared_fields_to_hf(c),
        "max_source_positions": c.source_positions, "max_target_positions": c.text_positions,
        "num_mel_bins": c.mel_bins,
    }  # fmt: skip
