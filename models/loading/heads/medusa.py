"""The formats of Medusa's authors and of vLLM.

Configs may list fewer heads than the file has, so the heads in the file are counted.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.medusa import MedusaConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, Rules, count_indices, rename_tensors
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal
from specjax.models.loading.tensors.tensors import INTEGERS, read_integers

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
    """Return the dialect of the writer, or None for other files."""
    names = contents.tensors
    if names and all(re.match(AUTHORS, name) for name in names):
        return "authors"
    return "vllm" if any(re.match(r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.", name) for name in names) else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, DIALECTS[dialect])
    heads, blocks = count_indices(tensors, r"blocks\.(\d+)\."), count_indices(tensors, r"blocks\.\d+\.layers\.(\d+)\.")
    if heads > HEADS or blocks > HEADS:
        raise UsageError(f"{folder} has {heads} heads of {blocks} blocks, and at most {HEADS} are supported")
    width = tensors.shape("blocks.0.layers.0.weight", folder)[0]
    check_equal(str(folder), "heads of width", width, spec.width, f"the width of the target {spec.name} is")
    own_head = "lm_heads.0.weight" in tensors
    ids = _read_token_map(tensors.pop("token_map", None), spec, folder)
    size = tensors["lm_heads.0.weight"].shape[0] if own_head else spec.vocab_size
    if ids is None:
        check_equal(str(folder), "heads of a vocabulary of", size, spec.vocab_size, f"the target {spec.name} has")
    elif len(ids) != size:
        raise UsageError(f"{folder} has a token_map of {len(ids)} ids, and heads of {size}")
    config = MedusaConfig(
        width, spec.vocab_size, heads, blocks, "blocks.0.layers.0.bias" in tensors, own_head,
        0 if ids is None else len(ids), spec.dtype,
    )  # fmt: skip
    listed = c.size("num_heads" if dialect == "vllm" else "medusa_num_heads", heads, maximum=HEADS)
    notes = [] if listed == heads else [f"{where} lists {listed} heads, but the file has {heads}; all of them are used"]
    flags = {name: getattr(config, name) for name in ("num_heads", "num_blocks", "bias", "own_head")}
    arrays = {} if ids is None else {"vocabulary.place": vocabulary.place_table(ids, spec.vocab_size)}
    return HeadPlan(
        "medusa", dialect, config, TABLE, tensors, flags | {"draft_vocab_size": size}, arrays,
        tuple(notes), UNUSED,
    )  # fmt: skip


def _read_token_map(tensor, spec: TargetSpec, folder) -> np.ndarray | None:
    """Return vLLM's map, which has the target's ids themselves."""
    if tensor is None:
        return None
    if len(tensor.shape) != 1 or tensor.kind not in INTEGERS:
        raise UsageError(f"{folder} has a token_map of type {tensor.kind}, not a list of ids")
    ids = read_integers(tensor)
    vocabulary.check_ids(ids, spec.vocab_size, f"{folder} has a token_map")
    return ids


def describe(config: MedusaConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
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


SHOWN = shown(
    "hidden_size", "medusa_fc_bias", "medusa_num_layers", "num_hidden_layers", "original_lm_head",
    "truncated_vocab_size", "version",
)  # fmt: skip

FORMAT = HeadFormat(
    kinds=("medusa",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"vllm": ()},
    describe=describe,
    neutral=SHOWN,
)
