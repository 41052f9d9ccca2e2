"""Apple's ReDrafter."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.redrafter import ReDrafterConfig
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_equal,
    indices,
    renamed,
)

KINDS = ("redrafter",)

MODEL_TYPE = "recurrent_drafting_drafter"

TABLE = {
    "rnn_w.weight": "rnn_w.weight",
    "rnn_u.weight": "rnn_u.weight",
    "rnn_u.bias": "rnn_u.bias",
    "input_proj.weight": "input_proj.weight",
    "input_proj.bias": "input_proj.bias",
    "blocks.*.linear.weight": "lm_head.*.linear.weight",
    "blocks.*.linear.bias": "lm_head.*.linear.bias",
    "head.weight": "head.weight",
}
RULES: Rules = ((r"^lm_head\.\d+\.weight$", "head.weight"),)


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no ReDrafter."""
    said = contents.config.given("model_type") and contents.config.text("model_type") == MODEL_TYPE
    return "apple" if said or "rnn_u.weight" in contents.tensors else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "redrafter"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target, or itself."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} is a ReDrafter, which takes no token map; leave it out")
    tensors = renamed(contents, RULES)
    size, exit_width = (*tensors.shape("head.weight", folder), 0)[:2]
    check_equal(str(folder), "a head of a vocabulary of", size, reader.vocab_size, f"the target {reader.name} has")
    width = c.size("hidden_size", reader.width)
    check_equal(where, "hidden_size", width, reader.width, f"the width of the target {reader.name} is")
    said = c.size("exit_dim", exit_width)
    check_equal(where, "exit_dim", said, exit_width, "its last lm_head is as wide as")
    blocks, has_weights = indices(tensors, r"lm_head\.(\d+)\.linear\."), "rnn_w.weight" in tensors
    config = ReDrafterConfig(width, exit_width, size, blocks, has_weights, reader.dtype)
    flags = {name: getattr(config, name) for name in ("exit_width", "num_blocks", "has_weights")}
    return Plan("redrafter", dialect, config, TABLE, tensors, flags)


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


def rules_of(config: ReDrafterConfig) -> Rules:
    """From the table's names to Apple's, whose last lm_head is the head."""
    return ((r"^head\.weight$", f"lm_head.{config.num_blocks}.weight"),)


LAYOUTS = {"apple": rules_of}


def describe(config: ReDrafterConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json."""
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "exit_dim": config.exit_width,
        "num_draft_layers": config.num_blocks,
        "rnn": config.has_weights,
        "base_model_name_or_path": about["name"],
        "torch_dtype": config.dtype,
    }
