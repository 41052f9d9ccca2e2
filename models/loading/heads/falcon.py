"""Falcon by its authors: EAGLE-1's layout with an LSTM in place of fc."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.falcon import FalconConfig, falcon_head
from specjax.models.loading.heads import eagle
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
    split_fused,
)
from specjax.models.loading.heads.describing import described_layers

KINDS = ("falcon",)

TABLE = {
    **{ours: theirs for ours, theirs in eagle.TABLE.items() if ours.startswith(("embed.", "stack."))},
    **{
        f"lstm.cells.*.{ours}.{what}": f"lstm.{what}_{theirs}_l*"
        for ours, theirs in (("inputs", "ih"), ("states", "hh"))
        for what in ("weight", "bias")
    },
}

CARRIES = "lstm_batch_first"
"""Ours: true where the LSTM reads the text. The authors call it with the batch in place of the text, so that of one
text each pair is read for itself."""


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no Falcon."""
    names = [name.removeprefix("model.") for name in contents.tensors]
    lstm, layers = (any(re.match(part, name) for name in names) for part in (r"lstm\.weight_ih_l", r"layers\.0\."))
    return "authors" if lstm and layers else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "falcon"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target, or itself."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} is a Falcon head, which takes no token map; leave it out")
    tensors = renamed(contents, eagle.DIALECTS["safeailab"])
    layer = layer_config(c, tensors, "layers.0.self_attn", indices(tensors, r"layers\.(\d+)\."), reader)
    split_fused(tensors, layer)
    check_of_target(where, layer.width, layer.vocab_size, reader)
    notes: list[str] = []
    config = FalconConfig(
        layer=dataclasses.replace(layer, vocab_size=reader.vocab_size),
        block_size=c.size("k_mask", most=1 << 10),
        lstm_layers=indices(tensors, r"lstm\.weight_ih_l(\d+)$"),
        carries=c.flag(CARRIES),
        bias="lstm.bias_ih_l0" in tensors,
        embeds=has_embedding(tensors, reader, notes),
        vocab_size=reader.vocab_size,
    )
    if c.given("bias") and c.flag("bias") != config.bias:
        has = "has" if config.bias else "has not"
        raise UsageError(f"{where} has bias {str(c.flag('bias')).lower()}, and {folder} {has} lstm.bias_ih_l0")
    if "lm_head.weight" in tensors:
        notes.append("lm_head.weight is not read: these heads predict with the target's")
    flags = {name: getattr(config, name) for name in ("block_size", "lstm_layers", "carries", "bias", "embeds")}
    return Plan("falcon", dialect, config, TABLE, tensors, flags, notes=tuple(notes), unused=eagle.UNUSED)


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one."""
    c: FalconConfig = head.head.config
    other = dataclasses.replace(c, carries=not c.carries)
    what = "reads the text" if other.carries else "reads each pair for itself"
    say = f'its LSTM {what}: set "{CARRIES}": {str(other.carries).lower()} in its config.json'
    return {say: head.replace(head=falcon_head(other))}


LAYOUTS: dict[str, Rules] = {"authors": ()}


def describe(config: FalconConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json. Raises: UsageError for a head without an LSTM."""
    if not config.lstm_layers:
        raise UsageError("a Falcon head without an LSTM cannot be saved; with blocks of one token save it as eagle")
    layers = described_layers(config.layer) | {"vocab_size": config.vocab_size or config.layer.vocab_size}
    own = {"k_mask": config.block_size, "bias": config.bias, "qkv_bias": config.layer.qkv_bias, CARRIES: config.carries}
    return {"architectures": ["LlamaForCausalLM"]} | own | layers
