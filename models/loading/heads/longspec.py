"""The format of LongSpec, with the tensor names of the authors' modules. No published file of theirs was read."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.heads.longspec import LongSpecConfig
from specjax.models.heads.target_keys import check_shape
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    attention_table,
    mlp_table,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.target_fit import TargetSpec, check_fits_target, layer_config

CROSS = {
    f"cross_attention.{path}": f"layers.0.cross_attn.{name}"
    for path, name in (
        ("q.weight", "q_proj.weight"),
        ("q.bias", "q_proj.bias"),
        ("o.weight", "o_proj.weight"),
        ("q_norm.weight", "q_norm.weight"),
    )
}
TABLE = {
    "attention_norm.weight": "layers.0.input_layernorm.weight",
    "cross_norm.weight": "layers.0.post_self_attention_layernorm.weight",
    "mlp_norm.weight": "layers.0.post_cross_attention_layernorm.weight",
    **attention_table("attention", "layers.0"),
    **CROSS,
    **mlp_table("mlp", "layers.0"),
    "norm.weight": "norm.weight",
}

READING = ((r"^(glide\.)?(?=self_attn|cross_attn|mlp|input_layernorm|post_)", "layers.0."),)

# The modules of the authors have keys and values for the cross attention, which reads those of the target instead.
UNUSED = (r".*cross_attn\.[kv]_proj\.(weight|bias)$", r".*rotary_emb\.inv_freq$")

WINDOWS = 2**20  # the largest window that is read


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    names = {name.removeprefix("glide.") for name in contents.tensors}
    return "authors" if {"cross_attn.q_proj.weight", "post_cross_attention_layernorm.weight"} <= names else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, where = contents.config, contents.config.where
    tensors = rename_tensors(contents, READING)
    layer = layer_config(c, tensors, "layers.0.self_attn", 1, spec, windows=False)
    split_fused(tensors, layer)
    check_fits_target(where, layer.width, layer.vocab_size, spec)
    check_shape(spec.target.model, "a longspec head", layer)
    config = LongSpecConfig(
        dataclasses.replace(layer, vocab_size=spec.vocab_size),
        c.size("window", 512, maximum=WINDOWS),
        "norm.weight" in tensors,
    )
    flags = {"window": config.window, "norm_output": config.norm_output}
    return HeadPlan("longspec", dialect, config, TABLE, tensors, flags, unused=UNUSED)


def describe(config: LongSpecConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Its window is a field of specjax."""
    return {"window": config.window, "base_model_name_or_path": info.target} | describe_layers(config.layer)


FORMAT = HeadFormat(
    kinds=("longspec",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"authors": ((r"^layers\.0\.", "glide."),)},
    describe=describe,
)
