"""The format of Clover-2's authors. Clover (without 2) was not published, so it has no format."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.clover import CloverConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    Rules,
    count_indices,
    layer_table,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import (
    TargetSpec,
    check_fits_target,
    layer_config,
    take_embedding,
    unembedding_rows,
)
from specjax.types import Array

GATES = {"gate": "clover_head_mlp_rnn", "next_gate": "clover_head_mlp_rnn2"}
TABLE = {
    "embed.weight": "embed_tokens.weight",
    **{f"{ours}.norm.weight": f"{theirs}.input_layernorm.weight" for ours, theirs in GATES.items()},
    **{
        f"{ours}.{part}.{leaf}": f"{theirs}.{part}.{leaf}"
        for ours, theirs in GATES.items()
        for part in "qkv"
        for leaf in ("weight", "bias")
    },
    **layer_table("stack.*", "layers.*"),
    "norm.weight": "clover_norm.weight",
    "head_norm.weight": "clover_head_norm.weight",
    **{
        f"{ours}.{leaf}": f"{theirs}.{leaf}"
        for ours, theirs in (("first", "clover_head_mlp"), ("next", "clover_head_mlp2"))
        for leaf in ("weight", "bias")
    },
}
OWN_EMBEDDING = "embeds"
"""A field of specjax: false for a head that reads the target's embedding, not a copy of its output layer."""

RULES: Rules = ((r"^clover_embed_tokens\.", "embed_tokens."),)

UNUSED = (r"lm_head\.weight$", r".*rotary_emb\.inv_freq$")


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "authors" if "clover_head_mlp.weight" in contents.tensors else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, where = contents.config, contents.config.where
    tensors = rename_tensors(contents, RULES)
    count = count_indices(tensors, r"layers\.(\d+)\.")
    # The config has the target's number of layers.
    counted = dataclasses.replace(c, values={**c.values, "num_hidden_layers": count})
    layer = layer_config(counted, tensors, "layers.0.self_attn", count, spec)
    split_fused(tensors, layer)
    check_fits_target(where, layer.width, layer.vocab_size, spec)
    if layer.width % layer.num_heads:
        raise UsageError(
            f"{where} has hidden_size {layer.width}, which is not a multiple of num_attention_heads "
            f"{layer.num_heads}, as Clover's gates need"
        )
    listed = c.subfields("clover").size("num_layers", count)
    notes = []
    if listed != count:
        notes.append(f"{where} has clover.num_layers {listed}, but the file has {count} layers; all of them are used")
    arrays: dict[str, np.ndarray | Array] = {}
    if "embed_tokens.weight" in tensors:
        embeds = take_embedding(tensors, spec, notes)
    elif not c.subfields("clover").flag(OWN_EMBEDDING, True):
        embeds = False
    else:
        embeds, arrays["embed.weight"] = True, unembedding_rows(spec, range(spec.vocab_size))
        notes.append("clover_embed_tokens is missing; used the rows of the target's output layer, as the authors do")
    if "lm_head.weight" in tensors:
        notes.append("lm_head.weight is not read: these heads use the target's output layer")
    config = CloverConfig(
        dataclasses.replace(layer, vocab_size=spec.vocab_size),
        taps=(spec.num_layers,),
        num_heads=c.subfields("clover").size("num_heads", 5, maximum=HEADS),
        embeds=embeds,
        vocab_size=spec.vocab_size,
    )
    flags = {"num_layers": count, "num_heads": config.num_heads, "embeds": embeds}
    return HeadPlan("clover", dialect, config, TABLE, tensors, flags, arrays, tuple(notes), UNUSED)


def describe(config: CloverConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Raises: UsageError for a head that the layout cannot represent."""
    if config.version != 2:
        raise UsageError("Clover (without 2) has no published layout, so it cannot be saved; keep its parameters")
    blocks = {"num_heads": config.num_heads, "num_layers": config.layer.num_layers, OWN_EMBEDDING: config.embeds}
    return {
        "architectures": ["LlamaForCausalLM"],
        "base_model_name_or_path": info.target,
        "clover": blocks,
    } | describe_layers(config.layer)


FORMAT = HeadFormat(
    kinds=("clover",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"authors": ((r"^embed_tokens\.", "clover_embed_tokens."),)},
    describe=describe,
    neutral=shown(f"clover.{OWN_EMBEDDING}"),
)
