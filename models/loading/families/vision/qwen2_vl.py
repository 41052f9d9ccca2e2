"""Qwen2-VL: a tower for images of any size, and a text model of Qwen2 whose images have positions on three axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from specjax.errors import UsageError
from specjax.models.decoder import DecoderConfig
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import HEADS, LAYERS, WIDTH, ConfigFields
from specjax.models.loading.families.vision import common
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import TowerSizes, VisionLanguageConfig
from specjax.models.vision.grid_tower import ROPE_BASE

HF_TYPES = ("qwen2_vl",)
GGUF_TYPES = ()

TEXT_FIELDS = {
    "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}  # fmt: skip
TOWER_FIELDS = {
    "depth": 32, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16, "in_channels": 3,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
"""Fields that a config may omit, as in the classes of transformers."""

OTHER_INPUTS = (
    "vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id", "in_chans",
    "spatial_patch_size", "hidden_size",
)  # fmt: skip
"""Fields of videos, those that other fields state too, and those that the tensors show."""

PREFIXES = "visual.", "model.visual."
"""Beginnings of the names of a tower, in files of different versions of transformers."""


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf.skip(*OTHER_INPUTS[:-1])
    fields = hf.subfields("text_config") if hf.has("text_config") else hf
    tied = fields.flag("tie_word_embeddings") or hf.flag("tie_word_embeddings")
    text = _text(fields, **options)
    sections = _sections(fields, text.head_dim)
    return VisionLanguageConfig.around(
        dataclasses.replace(text, tied=tied),
        tower=_tower(hf.subfields("vision_config").with_defaults(TOWER_FIELDS)),
        sections=sections,
        image_token=common.image_token(hf, 151_655, text),
        model_type="qwen2_vl",
        text_type="qwen2",
    )


def _text(fields: ConfigFields, **options) -> DecoderConfig:
    """Return the config of the text model, which is one of Qwen2 with other defaults."""
    fields.skip("model_type")
    values = {**fields.values, fields.prefix + "model_type": "qwen2"}
    base = {} if fields.has("rope_theta") or fields.has("rope_parameters") else {"rope_theta": 1_000_000.0}
    return llama.config_from_hf(dataclasses.replace(fields, values=values).with_defaults(TEXT_FIELDS | base), **options)


def _sections(fields: ConfigFields, head_dim: int) -> tuple[int, ...]:
    """Return the number of frequencies of each axis. Raises: UsageError if they are not those of a head."""
    blocks = [fields.subfields(name) for name in ("rope_parameters", "rope_scaling")]
    stated = [tuple(block.array("mrope_section", int)) for block in blocks if block.has("mrope_section")]
    sections: tuple[int, ...] = stated[0] if stated else (16, 24, 24)
    if len(sections) != 3 or sum(sections) != head_dim // 2 or min(sections) < 0:
        raise UsageError(
            f"{fields.where} has mrope_section {list(sections)}, which must be three numbers with the sum "
            f"{head_dim // 2}, half of a head"
        )
    return sections


def _tower(hf: ConfigFields) -> TowerSizes:
    hf.skip(*OTHER_INPUTS)
    rope = hf.subfields("rope_parameters")
    rope.skip("rope_type")
    if rope.number("rope_theta", ROPE_BASE) != ROPE_BASE:
        raise UsageError(
            f"{hf.where} has vision_config.rope_parameters.rope_theta {rope.number('rope_theta'):g}, which specjax "
            f"does not support (only {ROPE_BASE:g})"
        )
    width, heads = hf.size("embed_dim", maximum=WIDTH), hf.size("num_heads", maximum=HEADS)
    if width % (4 * heads):
        raise UsageError(
            f"{hf.where} has vision_config.embed_dim {width}, which must be a multiple of four times num_heads, {heads}"
        )
    return TowerSizes(
        width=width,
        num_layers=hf.size("depth", maximum=LAYERS),
        num_heads=heads,
        mlp_width=int(width * hf.number("mlp_ratio")),
        patch_size=hf.size("patch_size", maximum=common.PIXELS),
        channels=hf.size("in_channels", maximum=HEADS),
        frames=hf.size("temporal_patch_size", maximum=HEADS),
        merge=hf.size("spatial_merge_size", maximum=HEADS),
        activation=common.activation(hf, "hidden_act", "quick_gelu"),
    )


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    return {**common.text_names(config, "model."), **_image_names(config, PREFIXES[0])}


def variant_hf(config: VisionLanguageConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths of tower and connector in a file of another version of transformers."""
    prefix = next((p for p in PREFIXES if f"{p}merger.ln_q.weight" in names), PREFIXES[0])
    return _image_names(config, prefix)


def _image_names(config: VisionLanguageConfig, prefix: str) -> dict[str, StoredTensor]:
    width, block = config.tower.width, f"{prefix}blocks.*."
    modules = {"attention_norm": "norm1", "mlp_norm": "norm2", "o": "attn.proj", "up": "mlp.fc1", "down": "mlp.fc2"}
    stored = {"tower.patch.kernel": StoredTensor(f"{prefix}patch_embed.proj.weight")}
    for part in ("weight", "bias"):
        for path, name in modules.items():
            stored[f"tower.layers.*.{path}.{part}"] = StoredTensor(f"{block}{name}.{part}")
        for i, path in enumerate("qkv"):
            name = f"{block}attn.qkv.{part}"
            stored[f"tower.layers.*.{path}.{part}"] = StoredTensor(name, first=i * width, rows=3 * width)
        for path, name in {"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"}.items():
            stored[f"connector.{path}.{part}"] = StoredTensor(f"{prefix}merger.{name}.{part}")
    return stored


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    names = {activation: name for name, activation in common.ACTIVATIONS.items()}
    text, tower = common.to_hf(c)["text_config"], c.tower
    rope = {"rope_type": "default", "rope_theta": c.rope_base, "mrope_section": list(c.sections)}
    text = {name: value for name, value in text.items() if name not in ("rope_theta", "rope_scaling")}
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": c.model_type,
        "image_token_id": c.image_token,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
        "text_config": text | {"model_type": "qwen2_vl_text", "rope_parameters": rope},
        "vision_config": {
            "depth": tower.num_layers,
            "embed_dim": tower.width,
            "hidden_size": c.width,
            "hidden_act": names[tower.activation],
            "mlp_ratio": tower.mlp_width // tower.width,
            "num_heads": tower.num_heads,
            "in_channels": tower.channels,
            "patch_size": tower.patch_size,
            "spatial_merge_size": tower.merge,
            "temporal_patch_size": tower.frames,
        },
    }
