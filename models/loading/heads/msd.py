"""The format of MSD: the authors' EAGLE-1 layout, with the field `image_rows`.

A file of the authors has no such field, and is read as a head of EAGLE. With `"image_rows": "vectors"` it is MSD.
"""

from __future__ import annotations

from typing import Any

from specjax.models.heads.msd import ROWS, MsdConfig
from specjax.models.loading.heads import eagle, image_rows
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.target_fit import TargetSpec


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "authors" if image_rows.rows_of(contents) in ROWS else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    parts = image_rows.read_parts(contents, spec)
    config = MsdConfig(**parts.fields, rows="dropped" if parts.rows == "dropped" else "vectors")
    flags = {"rows": config.rows, "bias": config.bias, "embeds": config.embeds}
    return HeadPlan(
        "msd", dialect, config, image_rows.TABLE, parts.tensors, flags, notes=parts.notes, unused=eagle.UNUSED
    )  # fmt: skip


def describe(config: MsdConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
    return {"bias": config.bias} | image_rows.describe(config.rows, config.layer, config.vocab_size)


FORMAT = HeadFormat(
    kinds=("msd",), table=image_rows.TABLE, dialect_of=dialect_of, plan=plan, layouts={"authors": ()},
    describe=describe, spellings={"image_rows": "rows"},
)  # fmt: skip
