"""The format of SpecVLM: EAGLE-1's names, and the compressor. No file of the authors was read, so it is our own."""

from __future__ import annotations

from typing import Any, cast

from specjax.models.heads.specvlm import EXPERTS, SpecVlmConfig
from specjax.models.loading.heads import eagle, image_rows
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.target_fit import TargetSpec

PARTS = "queries", "conv", "gate_up", "gate_down"
TABLE = image_rows.TABLE | {f"compressor.{part}.weight": f"compressor.{part}.weight" for part in PARTS}
ROWS = "auto", *EXPERTS


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "specjax" if image_rows.rows_of(contents) in ROWS else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    parts = image_rows.read_parts(contents, spec)
    shape = lambda part: parts.tensors.shape(f"compressor.{part}.weight", contents.folder)
    config = SpecVlmConfig(
        **parts.fields, queries=shape("queries")[0], taps_of_conv=shape("conv")[0], expert=cast(Any, parts.rows),
        images=parts.images,
    )  # fmt: skip
    flags = {"queries": config.queries, "expert": config.expert, "bias": config.bias, "embeds": config.embeds}
    return HeadPlan("specvlm", dialect, config, TABLE, parts.tensors, flags, notes=parts.notes, unused=eagle.UNUSED)


def describe(config: SpecVlmConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
    return {"bias": config.bias} | image_rows.describe(config.expert, config.layer, config.vocab_size)


FORMAT = HeadFormat(
    kinds=("specvlm",), table=TABLE, dialect_of=dialect_of, plan=plan, layouts={"specjax": ()}, describe=describe,
    spellings={"image_rows": "expert"},
)  # fmt: skip
