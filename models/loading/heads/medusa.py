"""Medusa as its authors save it and as vLLM does.

Configs may say fewer heads than there are, so the heads in the file count.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.medusa import MedusaConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_equal,
    indices,
    renamed,
)
from specjax.models.loading.tensors.tensors import INTEGERS, read_integers

KINDS = ("medusa",)

UNUSED = (r"lm_head\.weight$",)

TABLE = {
    "branches.*.blocks.*.weight": "blocks.*.layers.*.weight",
    "branches.*.blocks.*.bias": "blocks.*.layers.*.bias",
    "branches.*.head.weight": "lm_heads.*.weight",
}
"""vLLM's names."""

AUTHORS = r"^(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$"
DIALECTS: dict[str, Rules] = {
    "authors": (
        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
    ),
    "vllm": ((r"^medusa_heads\.", ""),),
}


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no Medusa."""
    names = contents.tensors
    if names and all(re.match(AUTHORS, name) for name in names):
        return "authors"
    return "vllm" if any(re.match(r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.", name) for name in names) else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "medusa"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for heads that do not fit the target, or each other."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} holds Medusa's heads, which take no token map; leave it out")
    tensors = renamed(contents, DIALECTS[dialect])
    heads, blocks = indices(tensors, r"blocks\.(\d+)\."), indices(tensors, r"blocks\.\d+\.layers\.(\d+)\.")
    if heads > HEADS or blocks > HEADS:
        raise UsageError(f"{folder} has {heads} heads of {blocks} blocks, more than there are")
    width = tensors.shape("blocks.0.layers.0.weight", folder)[0]
    check_equal(str(folder), "heads of width", width, reader.width, f"the width of the target {reader.name} is")
    own_head = "lm_heads.0.weight" in tensors
    ids = _map(tensors.pop("token_map", None), reader, folder)
    size = tensors["lm_heads.0.weight"].shape[0] if own_head else reader.vocab_size
    if ids is None:
        check_equal(str(folder), "heads of a vocabulary of", size, reader.vocab_size, f"the target {reader.name} has")
    elif len(ids) != size:
        raise UsageError(f"{folder} has a token_map of {len(ids)} ids, and heads of {size}")
    config = MedusaConfig(
        width, reader.vocab_size, heads, blocks, "blocks.0.layers.0.bias" in tensors, own_head,
        0 if ids is None else len(ids), reader.dtype,
    )  # fmt: skip
    said = c.size("num_heads" if dialect == "vllm" else "medusa_num_heads", heads, most=HEADS)
    notes = [] if said == heads else [f"{where} says {said} heads, and the file has {heads}, which count"]
    flags = {name: getattr(config, name) for name in ("num_heads", "num_blocks", "bias", "own_head")}
    arrays = {} if ids is None else {"vocabulary.place": vocabulary.places(ids, reader.vocab_size)}
    return Plan(
        "medusa", dialect, config, TABLE, tensors, flags | {"draft_vocab_size": size}, arrays,
        tuple(notes), UNUSED,
    )  # fmt: skip


def _map(tensor, reader: Reader, folder) -> np.ndarray | None:
    """vLLM's map holds the target's ids themselves."""
    if tensor is None:
        return None
    if len(tensor.shape) != 1 or tensor.kind not in INTEGERS:
        raise UsageError(f"{folder} has a token_map of type {tensor.kind}, not a list of ids")
    ids = read_integers(tensor)
    vocabulary.check_ids(ids, reader.vocab_size, f"{folder} has a token_map")
    return ids


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {"vllm": ()}


def describe(config: MedusaConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.width,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size or config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": config.bias,
        "original_lm_head": not config.own_head,
        "torch_dtype": config.dtype,
    }
