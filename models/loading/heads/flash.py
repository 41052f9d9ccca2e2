"""The format of FLASH: EAGLE-1's names, and the learned queries. Its layer has our form, so it is specjax's own."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.heads.flash import FlashConfig
from specjax.models.loading.heads import eagle, image_rows
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.target_fit import TargetSpec

ROWS = "queries"
TABLE = {name: tensor for name, tensor in image_rows.TABLE.items() if not name.startswith("embed.")}
TABLE |= {"queries.weight": "queries.weight"}


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "specjax" if image_rows.rows_of(contents) == ROWS else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    parts = image_rows.read_parts(contents, spec)
    width, outputs = parts.layer.width, parts.tensors.shape("layers.0.mlp.down_proj.weight", contents.folder)[0]
    if outputs % width:
        raise UsageError(
            f"{contents.folder} has layers.0.mlp.down_proj.weight with {outputs} rows, no multiple of the width {width}"
        )
    queries = parts.tensors.shape("queries.weight", contents.folder)[0]
    config = FlashConfig(parts.layer, outputs // width, queries, parts.bias, parts.images)
    flags = {"block_size": config.block_size, "queries": queries, "bias": config.bias}
    return HeadPlan("flash", dialect, config, TABLE, parts.tensors, flags, notes=parts.notes, unused=eagle.UNUSED)


def describe(config: FlashConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
    return {"bias": config.bias} | image_rows.describe(ROWS, config.layer, config.layer.vocab_size)


FORMAT = HeadFormat(
    kinds=("flash",), table=TABLE, dialect_of=dialect_of, plan=plan, layouts={"specjax": ()}, describe=describe
)
