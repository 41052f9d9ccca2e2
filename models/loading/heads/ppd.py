"""The format of the prompts of Parallel Prompt Decoding: a PEFT adapter with additional fields in its config."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.ppd import PpdConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, Rules, rename_tensors
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.settings import HeadVariant
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal

TABLE = {"prompts.weight": "prompt_embeddings"}
RULES: Rules = ((r"^(.*\.)?prompt_encoder\.(default\.)?embedding\.weight$", "prompt_embeddings"),)

OTHERS = {
    "use_custom_lm_head": "a head of its own",
    "use_prefix_tuning": "a trained prefix",
}
"""Experiments of the authors that their server does not support."""


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    is_named = any(name == "prompt_embeddings" or "prompt_encoder." in name for name in contents.tensors)
    return "peft" if is_named else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, RULES)
    rows, width = (*tensors.shape("prompt_embeddings", folder), 0)[:2]
    check_equal(str(folder), "prompts of width", width, spec.width, f"the width of the target {spec.name} is")
    if not c.has("num_special_tokens"):
        raise UsageError(f"{where} has no num_special_tokens: its prompts were not trained to draft")
    num_prompts, copies = (
        c.size("num_special_tokens", maximum=HEADS),
        c.size("virtual_tokens_per_special_token", 1, maximum=HEADS),
    )
    if rows != num_prompts * copies:
        raise UsageError(
            f"{folder} has {rows} prompts, and {where} has {num_prompts} num_special_tokens of {copies} "
            "virtual_tokens_per_special_token"
        )
    _check_aggregation(contents, copies)
    config = PpdConfig(spec.width, num_prompts, copies, spec.dtype)
    return HeadPlan("ppd", dialect, config, TABLE, tensors, {"num_prompts": num_prompts, "copies": copies})


def _check_aggregation(contents: Contents, copies: int) -> None:
    """Raise a UsageError for prompts with another attention or aggregation than the paper's ensembles."""
    c = contents.config
    for flag, feature in OTHERS.items():
        if c.flag(flag):
            raise UsageError(f"{c.where} sets {flag}: {feature} next to the prompts is not supported")
    exits = c.size("num_exits", 1)
    if exits != 1:
        raise UsageError(f"{c.where} has num_exits {exits}, and only the target's last layer is supported (1)")
    attention = c.text("vt_attention_type", "decoder")
    if attention not in ("ensemble", "decoder") or (attention == "decoder" and copies > 1):
        fits = "ensemble" if copies > 1 else "ensemble or decoder"
        raise UsageError(
            f"{c.where} has vt_attention_type {quote(attention)}, and for {copies} copies {fits} is supported"
        )
    aggregation = c.text("aggregation_type", "mean")
    if aggregation != "mean" and copies > 1:
        raise UsageError(f"{c.where} has aggregation_type {quote(aggregation)}, and only mean is supported")


def variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    """Return other interpretations of the same tensors, by the error that they would fix."""
    c, rows = head.head.config, head.params["prompts"]["weight"]
    if c.copies == 1:
        return []
    other = jnp.swapaxes(rows.reshape(c.copies, c.num_prompts, c.width), 0, 1).reshape(rows.shape)
    reason = "the prompts of one copy are stored together"
    return [HeadVariant(reason, head.replace(params={"prompts": {"weight": other}}))]


def describe(config: PpdConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json with the fields of the authors' adapter_config.json."""
    return {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": config.num_prompts * config.copies,
        "token_dim": config.width,
        "num_special_tokens": config.num_prompts,
        "virtual_tokens_per_special_token": config.copies,
        "vt_attention_type": "ensemble",
        "aggregation_type": "mean",
        "num_exits": 1,
        "base_model_name_or_path": info.target,
    }


SHOWN = shown(
    "inference_mode", "num_attention_heads", "num_layers", "num_transformer_submodules", "num_virtual_tokens",
    "peft_type", "prompt_tuning_init", "prompt_tuning_init_text", "revision", "task_type", "token_dim",
    "tokenizer_name_or_path",
)  # fmt: skip

FORMAT = HeadFormat(
    kinds=("ppd",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"peft": ()},
    describe=describe,
    variants=variants,
    neutral=SHOWN,
)
