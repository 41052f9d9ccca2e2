"""The formats of P-EAGLE by vllm speculators and NeMo Automodel: an EAGLE-3 head with one more tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.models.heads.p_eagle import PEagleConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads import eagle3
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.mask_tokens import read_mask_token
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal

TABLE = eagle3.TABLE | {"mask_hidden": "mask_hidden"}


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return eagle3.dialect_of(contents, "peagle")


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, base = contents.config, eagle3.plan(contents, dialect, spec)
    notes = list(base.notes)
    mask = read_mask_token(contents, (c.subfields("dflash_config"), c), notes)
    check_equal(c.where, "mask_token_id", min(mask, spec.vocab_size - 1), mask,
                f"the target has {spec.vocab_size} ids, so it cannot be")  # fmt: skip
    if not (c.has("num_depths") or c.has("para_depths") or "depths" in contents.changes):
        notes.append(f"{c.where} has no num_depths; assumed 8 (--head-set depths=... overrides it)")
    config = PEagleConfig(
        **vars(base.config),
        mask_token=mask,
        depths=c.size("num_depths", c.size("para_depths", 8, maximum=HEADS), maximum=HEADS),
    )
    state = base.tensors.get("mask_hidden")
    if state is not None:
        base.tensors["mask_hidden"] = state._replace(shape=(int(np.prod(state.shape)),))
    flags = dict(base.flags) | {"mask_token": config.mask_token, "depths": config.depths}
    return base._replace(kind="p_eagle", config=config, table=TABLE, flags=flags, notes=tuple(notes))


def describe(config: PEagleConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
    described = eagle3.describe(config, layout, info, "peagle", "PEagleSpeculator")
    return described | {"mask_token_id": config.mask_token, "num_depths": config.depths}


FORMAT = HeadFormat(
    kinds=("p_eagle",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"speculators": ()},
    describe=describe,
    variants=eagle3.variants,
    shapes={"mask_hidden": (1, 1, -1)},  # the parameter is flat
    takes_token_map=True,
    neutral=eagle3.EAGLE_CONFIG,
    spellings={"mask_token_id": "mask_token", "pard_token": "mask_token", "num_depths": "depths"},
)
