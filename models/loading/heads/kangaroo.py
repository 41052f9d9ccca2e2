"""The format of Kangaroo's authors. Their files do not contain the exit layer of the target."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kangaroo import KangarooConfig
from specjax.models.loading.families.config_fields import LAYERS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    attention_table,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.settings import HeadVariant, change_config
from specjax.models.loading.heads.target_fit import TargetSpec, check_fits_target, layer_config

TABLE = {
    "attention_norm.weight": "layers.0.input_layernorm.weight",
    **attention_table("attention", "layers.0"),
    "norm.weight": "norm.weight",
}

UNUSED = (r".*rotary_emb\.inv_freq$",)

AUTHORS_EXIT = 2
NEARBY = range(1, 5)
"""Exit layers that the self-check tries. Deeper ones draft too slowly."""


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    names = contents.tensors
    has_attention_only = all(
        re.match(r"layers\.0\.(self_attn|input_layernorm)\.|norm\.weight$", name) for name in names
    )
    return (
        "authors" if has_attention_only and {"layers.0.input_layernorm.weight", "norm.weight"} <= set(names) else None
    )


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, where = contents.config, contents.config.where
    tensors = rename_tensors(contents, ())
    layer = layer_config(c, tensors, "layers.0.self_attn", 1, spec)
    split_fused(tensors, layer)
    check_fits_target(where, layer.width, layer.vocab_size, spec)
    exit_layer = c.size("exit_layer", AUTHORS_EXIT, maximum=LAYERS)
    if exit_layer > spec.num_layers and "exit_layer" not in contents.changes:
        field = "exit_layer" if c.has("exit_layer") else "the default exit_layer"
        raise UsageError(
            f"{where} has {field} {exit_layer}, and {spec.name} has {spec.num_layers} layers; choose a head of this "
            "target"
        )
    notes = []
    if not c.has("exit_layer"):
        notes.append(
            f"{where} has no exit_layer, the layer of the target after which it drafts; assumed the authors' "
            f"{AUTHORS_EXIT}"
        )
    config = KangarooConfig(dataclasses.replace(layer, vocab_size=spec.vocab_size), exit_layer)
    return HeadPlan(
        "kangaroo", dialect, config, TABLE, tensors, {"exit_layer": exit_layer}, notes=tuple(notes), unused=UNUSED,
        assumed=("exit_layer",) if notes else (),
    )  # fmt: skip


def variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    """Return other interpretations of the same tensors, by the error that they would fix."""
    layer = head.head.config.exit_layer
    return [
        change_config(head, {"exit_layer": other}, f"it drafts after layer {other} of the target, not after {layer}")
        for other in NEARBY
        if other <= num_layers and other != layer
    ]


def describe(config: KangarooConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Its exit_layer is a field of specjax; the authors pass it on the command line."""
    return {"exit_layer": config.exit_layer, "base_model_name_or_path": info.target} | describe_layers(config.layer)


FORMAT = HeadFormat(
    kinds=("kangaroo",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"authors": ()},
    describe=describe,
    variants=variants,
)
