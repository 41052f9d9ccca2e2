"""Clover-2 by its authors. Clover (without 2) was not published, and no file of it is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.clover import CloverConfig
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.families.config_fields import HEADS, Fields
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_of_target,
    has_embedding,
    indices,
    layer_config,
    renamed,
    rows_of_head,
    split_fused,
)
from specjax.models.loading.heads.describing import described_layers
from specjax.types import Array

KINDS = ("clover",)

GATES = {"gate": "clover_head_mlp_rnn", "next_gate": "clover_head_mlp_rnn2"}
TABLE = {
    "embed.weight": "embed_tokens.weight",
    **{f"{ours}.norm.weight": f"{theirs}.input_layernorm.weight" for ours, theirs in GATES.items()},
    **{
        f"{ours}.{part}.{what}": f"{theirs}.{part}.{what}"
        for ours, theirs in GATES.items()
        for part in "qkv"
        for what in ("weight", "bias")
    },
    "stack.*.attention_norm.weight": "layers.*.input_layernorm.weight",
    "stack.*.mlp_norm.weight": "layers.*.post_attention_layernorm.weight",
    **{
        f"stack.*.attention.{part}.{what}": f"layers.*.self_attn.{part}_proj.{what}"
        for part in "qkvo"
        for what in ("weight", "bias")
    },
    **{f"stack.*.attention.{part}_norm.weight": f"layers.*.self_attn.{part}_norm.weight" for part in "qk"},
    **{f"stack.*.mlp.{part}.weight": f"layers.*.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "norm.weight": "clover_norm.weight",
    "head_norm.weight": "clover_head_norm.weight",
    **{
        f"{ours}.{what}": f"{theirs}.{what}"
        for ours, theirs in (("first", "clover_head_mlp"), ("next", "clover_head_mlp2"))
        for what in ("weight", "bias")
    },
}
TABLE_OF_ITS_OWN = "embeds"
"""Our word: false where a head reads the target's embedding, not a copy of the target's head."""

RULES: Rules = ((r"^clover_embed_tokens\.", "embed_tokens."),)

UNUSED = (r"lm_head\.weight$", r".*rotary_emb\.inv_freq$")


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no Clover."""
    return "authors" if "clover_head_mlp.weight" in contents.tensors else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "clover"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target, or itself."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} holds Clover's heads, which take no token map; leave it out")
    tensors = renamed(contents, RULES)
    count = indices(tensors, r"layers\.(\d+)\.")
    counted = Fields({**c.values, "num_hidden_layers": count}, where)  # theirs is the target's; the file's counts
    layer = layer_config(counted, tensors, "layers.0.self_attn", count, reader)
    split_fused(tensors, layer)
    check_of_target(where, layer.width, layer.vocab_size, reader)
    if layer.width % layer.num_heads:
        raise UsageError(
            f"{where} has hidden_size {layer.width}, which its num_attention_heads {layer.num_heads} do not divide; "
            "Clover's gates need that"
        )
    said = c.inside("clover").size("num_layers", count)
    notes = [] if said == count else [f"{where} says clover.num_layers {said}, and the file has {count}, which count"]
    arrays: dict[str, np.ndarray | Array] = {}
    if "embed_tokens.weight" in tensors:
        embeds = has_embedding(tensors, reader, notes)
    elif not c.inside("clover").flag(TABLE_OF_ITS_OWN, True):
        embeds = False
    else:
        embeds, arrays["embed.weight"] = True, rows_of_head(reader, range(reader.vocab_size))
        notes.append("clover_embed_tokens is missing; the rows of the target's head are taken, as the authors do")
    if "lm_head.weight" in tensors:
        notes.append("lm_head.weight is not read: these heads predict with the target's")
    config = CloverConfig(
        dataclasses.replace(layer, vocab_size=reader.vocab_size),
        taps=(reader.num_layers,),
        num_heads=c.inside("clover").size("num_heads", 5, most=HEADS),
        embeds=embeds,
        vocab_size=reader.vocab_size,
    )
    flags = {"num_layers": count, "num_heads": config.num_heads, "embeds": embeds}
    return Plan("clover", dialect, config, TABLE, tensors, flags, arrays, tuple(notes), UNUSED)


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {"authors": ((r"^embed_tokens\.", "clover_embed_tokens."),)}


def describe(config: CloverConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json. Raises: UsageError for a head that the layout has no words for."""
    if config.version != 2:
        raise UsageError("Clover (without 2) has no published layout, so it cannot be saved; keep its parameters")
    blocks = {"num_heads": config.num_heads, "num_layers": config.layer.num_layers, TABLE_OF_ITS_OWN: config.embeds}
    return {
        "architectures": ["LlamaForCausalLM"],
        "base_model_name_or_path": about["name"],
        "clover": blocks,
    } | described_layers(config.layer)
