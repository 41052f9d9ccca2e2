"""Kangaroo's adapter by its authors. Behind which of the target's layers it reads, their files do not say."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kangaroo import KangarooConfig, kangaroo_head
from specjax.models.loading.families.config_fields import LAYERS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_of_target,
    layer_config,
    renamed,
    split_fused,
)
from specjax.models.loading.heads.describing import described_layers

KINDS = ("kangaroo",)

TABLE = {
    "attention_norm.weight": "layers.0.input_layernorm.weight",
    **{
        f"attention.{part}.{what}": f"layers.0.self_attn.{part}_proj.{what}"
        for part in "qkvo"
        for what in ("weight", "bias")
    },
    **{f"attention.{part}_norm.weight": f"layers.0.self_attn.{part}_norm.weight" for part in "qk"},
    "norm.weight": "norm.weight",
}

UNUSED = (r".*rotary_emb\.inv_freq$",)

AUTHORS_EXIT = 2
NEARBY = range(1, 5)
"""Exit layers that the self-check tries; deeper ones draft slower than they are worth."""


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no Kangaroo, for these have attention and norms alone."""
    names = contents.tensors
    own = all(re.match(r"layers\.0\.(self_attn|input_layernorm)\.|norm\.weight$", name) for name in names)
    return "authors" if own and {"layers.0.input_layernorm.weight", "norm.weight"} <= set(names) else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "kangaroo"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for an adapter that does not fit the target."""
    c, where = contents.config, contents.config.where
    if token_map is not None:
        raise UsageError(f"{contents.folder} is Kangaroo's adapter, which takes no token map; leave it out")
    tensors = renamed(contents, ())
    layer = layer_config(c, tensors, "layers.0.self_attn", 1, reader)
    split_fused(tensors, layer)
    check_of_target(where, layer.width, layer.vocab_size, reader)
    exit_layer = c.size("exit_layer", AUTHORS_EXIT, most=LAYERS)
    if exit_layer > reader.num_layers:
        said = "exit_layer" if c.given("exit_layer") else "no exit_layer, the authors' being"
        raise UsageError(
            f"{where} has {said} {exit_layer}, and {reader.name} has {reader.num_layers} layers; choose a head of this "
            "target"
        )
    notes = []
    if not c.given("exit_layer"):
        notes.append(
            f"{where} does not say behind which layer of the target it drafts; taken for the authors' {AUTHORS_EXIT}, "
            "which exit_layer in it changes"
        )
    config = KangarooConfig(dataclasses.replace(layer, vocab_size=reader.vocab_size), exit_layer)
    return Plan(
        "kangaroo", dialect, config, TABLE, tensors, {"exit_layer": exit_layer}, notes=tuple(notes), unused=UNUSED
    )


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one."""
    config = head.head.config
    return {
        f"it drafts behind layer {layer} of the target, and was read as of layer {config.exit_layer}; write exit_layer "
        f"{layer} into its config.json": head.replace(head=kangaroo_head(dataclasses.replace(config, exit_layer=layer)))
        for layer in NEARBY
        if layer <= num_layers and layer != config.exit_layer
    }


LAYOUTS: dict[str, Rules] = {"authors": ()}


def describe(config: KangarooConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json; the exit layer, which the authors give on their command line, is our own word in it."""
    return {"exit_layer": config.exit_layer, "base_model_name_or_path": about["name"]} | described_layers(config.layer)
