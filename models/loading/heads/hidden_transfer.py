"""The format of Hidden Transfer. No files are published, so it is specjax's own: one numbered tensor per matrix."""

from __future__ import annotations

import re
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.hidden_transfer import HiddenTransferConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, count_indices, rename_tensors
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal

TABLE = {"transfers.*.weight": "transfers.*.weight"}


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    names = contents.tensors
    is_match = bool(names) and all(re.match(r"transfers\.\d+\.weight$", name) for name in names)
    return "specjax" if is_match else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, ())
    width = tensors.shape("transfers.0.weight", folder)[0]
    check_equal(str(folder), "transfers of width", width, spec.width, f"the width of the target {spec.name} is")
    count, behind = count_indices(tensors, r"transfers\.(\d+)\."), tuple(c.array("behind", int))
    if count > HEADS or count != len(behind):
        raise UsageError(f"{folder} has {count} transfers, and {where} lists the layers of {len(behind)} in behind")
    missing = [layer for layer in behind if isinstance(layer, bool) or not 0 <= layer <= spec.num_layers]
    if missing:
        raise UsageError(
            f"{where} has transfers after layer {quote(missing[0])} of the target, and {spec.name} has "
            f"{spec.num_layers} layers; choose a head of this target"
        )
    config = HiddenTransferConfig(width, behind, spec.dtype)
    return HeadPlan("hidden_transfer", dialect, config, TABLE, tensors, {"behind": behind})


def describe(config: HiddenTransferConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json: the fields of the head's config, with the usual names of width and dtype."""
    return {
        "model_type": "hidden_transfer",
        "hidden_size": config.width,
        "behind": list(config.behind),
        "base_model_name_or_path": info.target,
        "torch_dtype": config.dtype,
    }


FORMAT = HeadFormat(
    kinds=("hidden_transfer",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"specjax": ()},
    describe=describe,
    neutral=shown("hidden_size"),
)
