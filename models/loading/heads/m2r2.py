"""The format of M2R2's fast stream. No files are published, so it is specjax's own, named like the parameters."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.heads.m2r2 import M2R2Config
from specjax.models.loading.families.config_fields import LAYERS
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, rename_tensors
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal

TABLE = {
    "down": "accelerators.down",
    "up": "accelerators.up",
    "key": "router.key",
    "query": "router.query",
    "bias": "router.bias",
}


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "specjax" if set(contents.tensors) == set(TABLE.values()) else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder = contents.config, contents.folder
    tensors = rename_tensors(contents, ())
    exit_layer, rank, width = (*tensors.shape("accelerators.down", folder), 0, 0)[:3]
    check_equal(str(folder), "accelerators of width", width, spec.width, f"the width of the target {spec.name} is")
    if not 1 <= exit_layer <= spec.num_layers:
        raise UsageError(
            f"{folder} has accelerators of {exit_layer} layers, and {spec.name} has {spec.num_layers}; choose a "
            "head of this target"
        )
    router_width = (*tensors.shape("router.query", folder), 0)[0]
    if min(rank, router_width) < 1:
        raise UsageError(
            f"{folder} has accelerators of rank {rank} and a router of width {router_width}; both must be at least 1"
        )
    config = M2R2Config(
        width,
        exit_layer,
        rank,
        rate=c.number("rate", 2.0),
        recent=c.size("recent", 4, maximum=LAYERS),
        router_width=router_width,
        dtype=spec.dtype,
    )
    return HeadPlan("m2r2", dialect, config, TABLE, tensors, {"exit_layer": exit_layer, "rank": rank})


def describe(config: M2R2Config, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json: the fields of the head's config that the shapes do not determine."""
    return {
        "model_type": "m2r2",
        "hidden_size": config.width,
        "rate": config.rate,
        "recent": config.recent,
        "base_model_name_or_path": info.target,
        "torch_dtype": config.dtype,
    }


FORMAT = HeadFormat(
    kinds=("m2r2",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"specjax": ()},
    describe=describe,
    neutral=shown("hidden_size"),
)
