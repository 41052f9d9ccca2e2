"""The format of Apple's ReDrafter."""

from __future__ import annotations

from typing import Any

from specjax.models.heads.redrafter import ReDrafterConfig
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, Rules, count_indices, rename_tensors
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal

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
    """Return the dialect of the writer, or None for other files."""
    is_named = contents.config.has("model_type") and contents.config.text("model_type") == MODEL_TYPE
    return "apple" if is_named or "rnn_u.weight" in contents.tensors else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, RULES)
    size, exit_width = (*tensors.shape("head.weight", folder), 0)[:2]
    check_equal(str(folder), "a head of a vocabulary of", size, spec.vocab_size, f"the target {spec.name} has")
    width = c.size("hidden_size", spec.width)
    check_equal(where, "hidden_size", width, spec.width, f"the width of the target {spec.name} is")
    listed_width = c.size("exit_dim", exit_width)
    check_equal(where, "exit_dim", listed_width, exit_width, "its last lm_head is as wide as")
    blocks, has_weights = count_indices(tensors, r"lm_head\.(\d+)\.linear\."), "rnn_w.weight" in tensors
    config = ReDrafterConfig(width, exit_width, size, blocks, has_weights, spec.dtype)
    flags = {name: getattr(config, name) for name in ("exit_width", "num_blocks", "has_weights")}
    return HeadPlan("redrafter", dialect, config, TABLE, tensors, flags)


def rules_of(config: ReDrafterConfig) -> Rules:
    """Return the renames from the table's names to Apple's, where the last lm_head is the output layer."""
    return ((r"^head\.weight$", f"lm_head.{config.num_blocks}.weight"),)


def describe(config: ReDrafterConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "exit_dim": config.exit_width,
        "num_draft_layers": config.num_blocks,
        "rnn": config.has_weights,
        "base_model_name_or_path": info.target,
        "torch_dtype": config.dtype,
    }


FORMAT = HeadFormat(
    kinds=("redrafter",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"apple": rules_of},
    describe=describe,
    neutral=shown("num_draft_layers", "rnn"),
)
