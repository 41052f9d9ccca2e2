"""HAMburger's parts beside a base, in a layout of our own: names of our modules, layers as Hugging Face has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.hamburger import HamburgerConfig
from specjax.models.loading.families.config_fields import HEADS, LAYERS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_of_target,
    indices,
    layer_config,
    renamed,
)
from specjax.models.loading.heads.describing import described_layers

KINDS = ("hamburger",)

TABLE = {
    "merge.places.weight": "merge.places.weight",
    **{f"merge.{part}.{what}": f"merge.{part}_proj.{what}" for part in "qkv" for what in ("weight", "bias")},
    "merge.o.weight": "merge.o_proj.weight",
    "stack.*.attention_norm.weight": "layers.*.input_layernorm.weight",
    "stack.*.mlp_norm.weight": "layers.*.post_attention_layernorm.weight",
    **{
        f"stack.*.attention.{part}.{what}": f"layers.*.self_attn.{part}_proj.{what}"
        for part in "qkvo"
        for what in ("weight", "bias")
    },
    **{f"stack.*.attention.{part}_norm.weight": f"layers.*.self_attn.{part}_norm.weight" for part in "qk"},
    **{f"stack.*.mlp.{part}.weight": f"layers.*.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "norm.weight": "norm.weight",
    **{f"stop.*.{what}": f"stop.*.{what}" for what in ("weight", "bias")},
}


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no HAMburger."""
    return "specjax" if {"merge.places.weight", "stop.0.weight"} <= set(contents.tensors) else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "hamburger"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for parts that do not fit the target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} holds HAMburger's parts, which take no token map; leave it out")
    tensors = renamed(contents, ())
    layer = layer_config(c, tensors, "layers.0.self_attn", indices(tensors, r"layers\.(\d+)\."), reader)
    check_of_target(where, layer.width, layer.vocab_size, reader)
    taps = tuple(c.array("streams", int))
    wrong = [tap for tap in taps if isinstance(tap, bool) or not 0 <= tap <= reader.num_layers]
    if wrong or not taps:
        raise UsageError(
            f"{where} reads the target's streams {quote(list(taps))}, and {reader.name} has {reader.num_layers} "
            "layers; choose a head of this target"
        )
    segment = tensors.shape("merge.places.weight", folder)[0]
    heads = c.size("merge_heads", most=HEADS)
    if not 2 <= segment <= LAYERS or layer.width % heads or layer.width % 2:
        raise UsageError(
            f"{folder} merges {segment} tokens by {heads} heads of a width of {layer.width}, which no file has"
        )
    config = HamburgerConfig(layer, taps, segment, heads)
    return Plan("hamburger", dialect, config, TABLE, tensors, {"streams": taps, "segment": segment})


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {"specjax": ()}


def describe(config: HamburgerConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json: our own words, and those that Hugging Face has for decoder layers."""
    return {
        "streams": list(config.taps),
        "merge_heads": config.merge_heads,
        "base_model_name_or_path": about["name"],
    } | described_layers(config.layer)
