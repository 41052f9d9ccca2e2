"""The format of Falcon's authors: EAGLE-1's layout with an LSTM in place of fc."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.falcon import FalconConfig
from specjax.models.loading.heads import eagle
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    count_indices,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.settings import HeadVariant, change_config
from specjax.models.loading.heads.target_fit import TargetSpec, check_fits_target, layer_config, take_embedding

TABLE = {
    **{ours: theirs for ours, theirs in eagle.TABLE.items() if ours.startswith(("embed.", "stack."))},
    **{
        f"lstm.cells.*.{ours}.{leaf}": f"lstm.{leaf}_{theirs}_l*"
        for ours, theirs in (("inputs", "ih"), ("states", "hh"))
        for leaf in ("weight", "bias")
    },
}

CARRIES = "lstm_batch_first"
"""A field of specjax: true if the LSTM carries its state along the text.

The authors' call swaps batch and text, so their LSTM reads each pair of one text alone."""


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    names = [name.removeprefix("model.") for name in contents.tensors]
    lstm, layers = (any(re.match(part, name) for name in names) for part in (r"lstm\.weight_ih_l", r"layers\.0\."))
    return "authors" if lstm and layers else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, eagle.DIALECTS["safeailab"])
    layer = layer_config(c, tensors, "layers.0.self_attn", count_indices(tensors, r"layers\.(\d+)\."), spec)
    split_fused(tensors, layer)
    check_fits_target(where, layer.width, layer.vocab_size, spec)
    notes: list[str] = []
    config = FalconConfig(
        layer=dataclasses.replace(layer, vocab_size=spec.vocab_size),
        block_size=c.size("k_mask", maximum=1 << 10),
        lstm_layers=count_indices(tensors, r"lstm\.weight_ih_l(\d+)$"),
        carries=c.flag(CARRIES),
        bias="lstm.bias_ih_l0" in tensors,
        embeds=take_embedding(tensors, spec, notes),
        vocab_size=spec.vocab_size,
    )
    if c.has("bias") and c.flag("bias") != config.bias:
        has = "has" if config.bias else "lacks"
        raise UsageError(f"{where} has bias {str(c.flag('bias')).lower()}, and {folder} {has} lstm.bias_ih_l0")
    if "lm_head.weight" in tensors:
        notes.append("lm_head.weight is not read: these heads use the target's output layer")
    flags = {name: getattr(config, name) for name in ("block_size", "lstm_layers", "carries", "bias", "embeds")}
    return HeadPlan("falcon", dialect, config, TABLE, tensors, flags, notes=tuple(notes), unused=eagle.UNUSED)


def variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    """Return other interpretations of the same tensors, by the error that they would fix."""
    carries = not head.head.config.carries
    reading = "carries its state along the text" if carries else "reads each pair alone"
    return [change_config(head, {"carries": carries}, f"its LSTM {reading}")]


def describe(config: FalconConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Raises: UsageError for a head without an LSTM."""
    if not config.lstm_layers:
        raise UsageError("a Falcon head without an LSTM cannot be saved; with blocks of one token save it as eagle")
    layers = describe_layers(config.layer) | {"vocab_size": config.vocab_size or config.layer.vocab_size}
    fields = {
        "k_mask": config.block_size,
        "bias": config.bias,
        "qkv_bias": config.layer.qkv_bias,
        CARRIES: config.carries,
    }
    return {"architectures": ["LlamaForCausalLM"]} | fields | layers


FORMAT = HeadFormat(
    kinds=("falcon",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"authors": ()},
    describe=describe,
    variants=variants,
    neutral=shown("qkv_bias"),
)
