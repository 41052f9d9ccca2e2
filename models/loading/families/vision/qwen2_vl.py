"""Qwen2-VL: a tower for images of any size, and a text model of Qwen2 whose images have positions on three axes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.vision import common, qwen_grids
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import TowerSizes, VisionLanguageConfig

HF_TYPES = ("qwen2_vl",)
GGUF_TYPES = ()

FAMILY = qwen_grids.GridFamily(
    "qwen2_vl", "qwen2", qwen_grids.QWEN2_FIELDS,
    {
        "depth": 32, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16, "in_channels": 3,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    rope_base=1e6, sections=(16, 24, 24),
    sublayers={"attention_norm": "norm1", "mlp_norm": "norm2", "o": "attn.proj", "up": "mlp.fc1", "down": "mlp.fc2"},
    merger={"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"},
    width_field="embed_dim",
)  # fmt: skip


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    return FAMILY.config(hf, _tower, **options)


def _tower(hf: ConfigFields) -> TowerSizes:
    hf.skip("hidden_size")  # the width of the text model
    sizes = FAMILY.tower(hf)
    return FAMILY.tower(hf, mlp_width=int(sizes.width * hf.number("mlp_ratio")))


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    return {**common.text_names(config, "model."), **FAMILY.stored(config)}


def variant_hf(config: VisionLanguageConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths of tower and connector in a file of another version of transformers."""
    return FAMILY.stored(config, qwen_grids.find_prefix(names))


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    return FAMILY.to_hf(c, hidden_size=c.width, mlp_ratio=c.tower.mlp_width // c.tower.width)
