"""The format of HAMburger's parts. No files are published, so it is specjax's own, with Hugging Face's layer names."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.hamburger import HamburgerConfig
from specjax.models.loading.families.config_fields import HEADS, LAYERS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    count_indices,
    layer_table,
    rename_tensors,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.target_fit import TargetSpec, check_fits_target, layer_config

TABLE = {
    "merge.places.weight": "merge.places.weight",
    **{f"merge.{part}.{leaf}": f"merge.{part}_proj.{leaf}" for part in "qkv" for leaf in ("weight", "bias")},
    "merge.o.weight": "merge.o_proj.weight",
    **layer_table("stack.*", "layers.*"),
    "norm.weight": "norm.weight",
    **{f"stop.*.{leaf}": f"stop.*.{leaf}" for leaf in ("weight", "bias")},
}


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "specjax" if {"merge.places.weight", "stop.0.weight"} <= set(contents.tensors) else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, ())
    layer = layer_config(c, tensors, "layers.0.self_attn", count_indices(tensors, r"layers\.(\d+)\."), spec)
    check_fits_target(where, layer.width, layer.vocab_size, spec)
    taps = tuple(c.array("streams", int))
    wrong = [tap for tap in taps if isinstance(tap, bool) or not 0 <= tap <= spec.num_layers]
    if wrong or not taps:
        raise UsageError(
            f"{where} reads the target's streams {quote(list(taps))}, and {spec.name} has {spec.num_layers} "
            "layers; choose a head of this target"
        )
    segment = tensors.shape("merge.places.weight", folder)[0]
    heads = c.size("merge_heads", maximum=HEADS)
    if not 2 <= segment <= LAYERS or layer.width % heads or layer.width % 2:
        raise UsageError(
            f"{folder} merges {segment} tokens by {heads} heads of width {layer.width}, which is not supported"
        )
    config = HamburgerConfig(layer, taps, segment, heads)
    return HeadPlan("hamburger", dialect, config, TABLE, tensors, {"streams": taps, "segment": segment})


def describe(config: HamburgerConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json: fields of specjax, and Hugging Face's fields of decoder layers."""
    return {
        "streams": list(config.taps),
        "merge_heads": config.merge_heads,
        "base_model_name_or_path": info.target,
    } | describe_layers(config.layer)


FORMAT = HeadFormat(
    kinds=("hamburger",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"specjax": ()},
    describe=describe,
)
