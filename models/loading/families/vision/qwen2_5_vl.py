"""Qwen2.5-VL: Qwen2-VL with RMS norms, gated MLPs and windows of attention in the tower."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specjax.errors import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.vision import common, qwen_grids
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import TowerSizes, VisionLanguageConfig

HF_TYPES = ("qwen2_5_vl",)
GGUF_TYPES = ()

FAMILY = qwen_grids.GridFamily(
    "qwen2_5_vl", "qwen2", qwen_grids.QWEN2_FIELDS,
    {
        "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
        "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    rope_base=1e6, sections=(16, 24, 24),
    sublayers={
        "attention_norm": "norm1", "mlp_norm": "norm2", "o": "attn.proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    merger={"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"},
)  # fmt: skip


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    return FAMILY.config(hf, _tower, **options)


def _tower(hf: ConfigFields) -> TowerSizes:
    sizes = FAMILY.tower(hf)
    pixels, block = hf.size("window_size", maximum=common.PIXELS), sizes.patch_size * sizes.merge
    if pixels < block:
        raise UsageError(
            f"{hf.where} has {hf.prefix}window_size {pixels}, which must be at least {block}, the pixels of a block of "
            "patches"
        )
    return FAMILY.tower(
        hf, gated=True, mlp_width=qwen_grids.mlp_width(hf), window=pixels // block * sizes.merge,
        full_layers=qwen_grids.layers_of(hf, "fullatt_block_indexes"),
    )  # fmt: skip


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    return {**common.text_names(config, "model."), **FAMILY.stored(config)}


def variant_hf(config: VisionLanguageConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths of tower and connector in a file of another version of transformers."""
    return FAMILY.stored(config, qwen_grids.find_prefix(names))


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    return FAMILY.to_hf(
        c, out_hidden_size=c.width, intermediate_size=c.tower.mlp_width,
        window_size=c.tower.window * c.tower.patch_size, fullatt_block_indexes=list(c.tower.full_layers),
    )  # fmt: skip
