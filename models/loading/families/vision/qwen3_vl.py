"""Qwen3-VL: a tower with stretched positions, whose inner layers feed the first layers of a text model of Qwen3."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from specjax.errors import UsageError
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.vision import common, qwen_grids
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import TowerSizes, VisionLanguageConfig

HF_TYPES = ("qwen3_vl",)
GGUF_TYPES = ()

FAMILY = qwen_grids.GridFamily(
    "qwen3_vl", "qwen3",
    {
        "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 128_000,
    },
    {
        "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
        "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    },
    rope_base=500_000.0, sections=(24, 20, 20),
    sublayers={
        "attention_norm": "norm1", "mlp_norm": "norm2", "o": "attn.proj", "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
    },
    merger={"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"},
    interleaved=True,
)  # fmt: skip


def config_from_hf(hf: ConfigFields, **options) -> VisionLanguageConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    config = FAMILY.config(hf, _tower, **options)
    deep = len(config.tower.deep_layers)
    if deep > config.num_layers:
        raise UsageError(
            f"{hf.where} has {deep} deepstack_visual_indexes, which must be at most the {config.num_layers} layers of "
            "the text model"
        )
    return config


def _tower(hf: ConfigFields) -> TowerSizes:
    count = hf.size("num_position_embeddings", maximum=ROWS)
    side = math.isqrt(count)
    if side**2 != count:
        raise UsageError(f"{hf.where} has {hf.prefix}num_position_embeddings {count}, which must be a square number")
    return FAMILY.tower(
        hf, patch_bias=True, mlp_width=qwen_grids.mlp_width(hf), table_side=side,
        deep_layers=qwen_grids.layers_of(hf, "deepstack_visual_indexes"),
    )  # fmt: skip


def stored_hf(config: VisionLanguageConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint, as transformers writes it."""
    return {**common.text_names(config, "model.language_model."), **_image_names(config, qwen_grids.PREFIXES[1])}


def variant_hf(config: VisionLanguageConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths in a file with these tensors. The reader of files renames those of the text model."""
    return {**common.text_names(config, "model."), **_image_names(config, qwen_grids.find_prefix(names))}


def _image_names(config: VisionLanguageConfig, prefix: str) -> dict[str, StoredTensor]:
    stored = FAMILY.stored(config, prefix)
    stored["tower.patch.bias"] = StoredTensor(f"{prefix}patch_embed.proj.bias")
    stored["tower.positions.table"] = StoredTensor(f"{prefix}pos_embed.weight")
    for path, name in FAMILY.merger.items():
        for part in ("weight", "bias"):
            stored[f"connector.deep.*.{path}.{part}"] = StoredTensor(f"{prefix}deepstack_merger_list.*.{name}.{part}")
    return stored


def config_to_hf(c: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    return FAMILY.to_hf(
        c, out_hidden_size=c.width, intermediate_size=c.tower.mlp_width, num_position_embeddings=c.tower.table_side**2,
        deepstack_visual_indexes=list(c.tower.deep_layers),
    )  # fmt: skip
