"""The format of the authors of Hydra and Hydra++. The module numbers of Hydra++ include a dropout layer."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.hydra import HydraConfig
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    Rules,
    count_indices,
    layer_table,
    rename_tensors,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal, layer_config, target_layer_config

PREFIX = "prefix_embeding_layer"  # sic
TABLE = {
    **{
        f"branches.*.{ours}.{leaf}": f"hydra_mlp.*.{theirs}.{leaf}"
        for ours, theirs in (
            ("first.residual", "0.res_connection"),
            ("first.linear", "0.linear"),
            ("blocks.*.linear", "*+1.linear"),
        )
        for leaf in ("weight", "bias")
    },
    "branches.*.head.weight": "hydra_lm_head.*.weight",
    "branches.*.head_bias": "hydra_lm_head.*.bias",
    **layer_table("prefix", f"{PREFIX}.layers.0"),
    "norm.weight": f"{PREFIX}.norm.weight",
}

UNUSED = (PREFIX + r"\.embed_tokens\.", r"input_embed_fn\.", r".*rotary_emb\.inv_freq$")

WITH_DROPOUT: Rules = (
    (r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda match: f"{match[1]}.{int(match[2]) // 2}."),
    (r"^(hydra_lm_head\.\d+)\.1\.", r"\1."),
)

ARCHITECTURES = ("mlp", "prefix-mlp")


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "authors" if any(name.startswith("hydra_mlp.") for name in contents.tensors) else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    has_prefix = any(name.startswith(PREFIX) for name in contents.tensors)
    architecture = c.text("hydra_head_arch", ARCHITECTURES[has_prefix])
    if architecture != ARCHITECTURES[has_prefix]:
        raise UsageError(
            f"{where} has hydra_head_arch {quote(architecture)}, and the file is of {ARCHITECTURES[has_prefix]}"
        )
    if not c.flag("grounded_heads", True) or c.size("hidden_state_offset", 0, minimum=0) != 0:
        raise UsageError(f"{where} sets grounded_heads false or a hidden_state_offset, which specjax does not support")
    tensors = rename_tensors(contents, WITH_DROPOUT if has_prefix else ())
    width = tensors.shape("hydra_mlp.0.0.linear.weight", folder)[0]
    check_equal(str(folder), "heads of width", width, spec.width, f"the width of the target {spec.name} is")
    size = tensors.shape("hydra_lm_head.0.weight", folder)[0]
    check_equal(str(folder), "heads of a vocabulary of", size, spec.vocab_size, f"the target {spec.name} has")
    layer = None
    if has_prefix and c.has("hidden_size"):
        layer = layer_config(c, tensors, f"{PREFIX}.layers.0.self_attn", 1, spec)
    elif has_prefix:
        layer = target_layer_config(spec, "the prefix layer of Hydra++")
    config = HydraConfig(
        width,
        size,
        count_indices(tensors, r"hydra_mlp\.(\d+)\."),
        count_indices(tensors, r"hydra_mlp\.0\.(\d+)\."),
        layer,
        spec.dtype,
    )
    flags = {"num_heads": config.num_heads, "num_blocks": config.num_blocks, "prefix": has_prefix}
    return HeadPlan("hydra", dialect, config, TABLE, tensors, flags, unused=UNUSED)


def rules_of(config: HydraConfig) -> Rules:
    """Return the renames from the table's names to the authors'."""
    if config.layer is None:
        return ()
    return (
        (r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda match: f"{match[1]}.{2 * int(match[2]) + 1}."),
        (r"^(hydra_lm_head\.\d+)\.", r"\1.1."),
    )


def describe(config: HydraConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. The authors' config does not describe the prefix layer, which is like the target's."""
    return {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_blocks,
        "hydra_head_arch": ARCHITECTURES[config.layer is not None],
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": info.target,
    } | ({} if config.layer is None else describe_layers(config.layer))


FORMAT = HeadFormat(
    kinds=("hydra",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"authors": rules_of},
    describe=describe,
    neutral=shown("hydra_num_heads", "hydra_num_layers"),
)
