"""The prompts of Parallel Prompt Decoding: an adapter of PEFT's whose config its authors extended."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.ppd import PpdConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads.checkpoint_contents import Contents, Plan, Reader, Rules, check_equal, renamed

KINDS = ("ppd",)

TABLE = {"prompts.weight": "prompt_embeddings"}
RULES: Rules = ((r"^(.*\.)?prompt_encoder\.(default\.)?embedding\.weight$", "prompt_embeddings"),)

OTHERS = {
    "use_custom_lm_head": "a head of its own",
    "use_prefix_tuning": "a trained prefix",
}
"""What the authors tried besides, and do not serve."""


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no set of prompts."""
    is_named = any(name == "prompt_embeddings" or "prompt_encoder." in name for name in contents.tensors)
    return "peft" if is_named else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "ppd"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for prompts that do not fit the target, or that draft in another way."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} holds prompts, which take no token map; leave it out")
    tensors = renamed(contents, RULES)
    rows, width = (*tensors.shape("prompt_embeddings", folder), 0)[:2]
    check_equal(str(folder), "prompts of width", width, reader.width, f"the width of the target {reader.name} is")
    if not c.given("num_special_tokens"):
        raise UsageError(f"{where} has no num_special_tokens: its prompts were not trained to draft")
    most, copies = c.size("num_special_tokens", most=HEADS), c.size("virtual_tokens_per_special_token", 1, most=HEADS)
    if rows != most * copies:
        raise UsageError(
            f"{folder} has {rows} prompts, and {where} says {most} num_special_tokens of {copies} "
            "virtual_tokens_per_special_token"
        )
    _check_way(contents, copies)
    config = PpdConfig(reader.width, most, copies, reader.dtype)
    return Plan("ppd", dialect, config, TABLE, tensors, {"num_prompts": most, "copies": copies})


def _check_way(contents: Contents, copies: int) -> None:
    """Raises: UsageError for prompts that see or say other things than those of the paper's ensembles."""
    c = contents.config
    for flag, what in OTHERS.items():
        if c.flag(flag):
            raise UsageError(f"{c.where} sets {flag}: {what} beside the prompts is not supported")
    exits = c.size("num_exits", 1)
    if exits != 1:
        raise UsageError(f"{c.where} has num_exits {exits}, and only the target's last layer is supported (1)")
    sees = c.text("vt_attention_type", "decoder")
    if sees not in ("ensemble", "decoder") or (sees == "decoder" and copies > 1):
        fits = "ensemble" if copies > 1 else "ensemble or decoder"
        raise UsageError(f"{c.where} has vt_attention_type {quote(sees)}, and for {copies} copies {fits} is supported")
    way = c.text("aggregation_type", "mean")
    if way != "mean" and copies > 1:
        raise UsageError(f"{c.where} has aggregation_type {quote(way)}, and only mean is supported")


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one."""
    c, rows = head.head.config, head.params["prompts"]["weight"]
    if c.copies == 1:
        return {}
    other = jnp.swapaxes(rows.reshape(c.copies, c.num_prompts, c.width), 0, 1).reshape(rows.shape)
    return {"the prompts of one copy stand together": head.replace(params={"prompts": {"weight": other}})}


LAYOUTS: dict[str, Rules] = {"peft": ()}


def describe(config: PpdConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json, with what the authors' adapter_config.json has."""
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
        "base_model_name_or_path": about["name"],
    }
