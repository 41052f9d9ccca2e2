"""Hydra and Hydra++ by their authors. A dropout counts in the numbers of Hydra++'s modules."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.hydra import HydraConfig
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_equal,
    indices,
    layer_config,
    layer_of_target,
    renamed,
)
from specjax.models.loading.heads.describing import described_layers

KINDS = ("hydra",)

PREFIX = "prefix_embeding_layer"  # sic
TABLE = {
    **{
        f"branches.*.{ours}.{what}": f"hydra_mlp.*.{theirs}.{what}"
        for ours, theirs in (
            ("first.residual", "0.res_connection"),
            ("first.linear", "0.linear"),
            ("blocks.*.linear", "*+1.linear"),
        )
        for what in ("weight", "bias")
    },
    "branches.*.head.weight": "hydra_lm_head.*.weight",
    "branches.*.head_bias": "hydra_lm_head.*.bias",
    "prefix.attention_norm.weight": f"{PREFIX}.layers.0.input_layernorm.weight",
    "prefix.mlp_norm.weight": f"{PREFIX}.layers.0.post_attention_layernorm.weight",
    **{
        f"prefix.attention.{part}.{what}": f"{PREFIX}.layers.0.self_attn.{part}_proj.{what}"
        for part in "qkvo"
        for what in ("weight", "bias")
    },
    **{f"prefix.attention.{part}_norm.weight": f"{PREFIX}.layers.0.self_attn.{part}_norm.weight" for part in "qk"},
    **{f"prefix.mlp.{part}.weight": f"{PREFIX}.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "norm.weight": f"{PREFIX}.norm.weight",
}

UNUSED = (PREFIX + r"\.embed_tokens\.", r"input_embed_fn\.", r".*rotary_emb\.inv_freq$")

WITH_DROPOUT: Rules = (
    (r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda match: f"{match[1]}.{int(match[2]) // 2}."),
    (r"^(hydra_lm_head\.\d+)\.1\.", r"\1."),
)

ARCHITECTURES = ("mlp", "prefix-mlp")


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no Hydra."""
    return "authors" if any(name.startswith("hydra_mlp.") for name in contents.tensors) else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "hydra"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for heads that do not fit the target, or that are of another architecture."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} holds Hydra's heads, which take no token map; leave it out")
    has_prefix = any(name.startswith(PREFIX) for name in contents.tensors)
    said = c.text("hydra_head_arch", ARCHITECTURES[has_prefix])
    if said != ARCHITECTURES[has_prefix]:
        raise UsageError(f"{where} has hydra_head_arch {quote(said)}, and the file is of {ARCHITECTURES[has_prefix]}")
    if not c.flag("grounded_heads", True) or c.size("hidden_state_offset", 0, least=0) != 0:
        raise UsageError(f"{where} sets grounded_heads false or a hidden_state_offset, which specjax does not support")
    tensors = renamed(contents, WITH_DROPOUT if has_prefix else ())
    width = tensors.shape("hydra_mlp.0.0.linear.weight", folder)[0]
    check_equal(str(folder), "heads of width", width, reader.width, f"the width of the target {reader.name} is")
    size = tensors.shape("hydra_lm_head.0.weight", folder)[0]
    check_equal(str(folder), "heads of a vocabulary of", size, reader.vocab_size, f"the target {reader.name} has")
    layer = None
    if has_prefix and c.given("hidden_size"):
        layer = layer_config(c, tensors, f"{PREFIX}.layers.0.self_attn", 1, reader)
    elif has_prefix:
        layer = layer_of_target(reader, "the prefix layer of Hydra++")
    config = HydraConfig(
        width,
        size,
        indices(tensors, r"hydra_mlp\.(\d+)\."),
        indices(tensors, r"hydra_mlp\.0\.(\d+)\."),
        layer,
        reader.dtype,
    )
    flags = {"num_heads": config.num_heads, "num_blocks": config.num_blocks, "prefix": has_prefix}
    return Plan("hydra", dialect, config, TABLE, tensors, flags, unused=UNUSED)


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


def rules_of(config: HydraConfig) -> Rules:
    """From the table's names to the authors'."""
    if config.layer is None:
        return ()
    return (
        (r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda match: f"{match[1]}.{2 * int(match[2]) + 1}."),
        (r"^(hydra_lm_head\.\d+)\.", r"\1.1."),
    )


LAYOUTS = {"authors": rules_of}


def describe(config: HydraConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json; of the prefix layer the authors have no words, it being like the target's."""
    return {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_blocks,
        "hydra_head_arch": ARCHITECTURES[config.layer is not None],
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": about["name"],
    } | ({} if config.layer is None else described_layers(config.layer))
