"""P-EAGLE by vllm speculators and NeMo Automodel: an EAGLE-3 head with a state for tokens that are not there yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.models.heads.p_eagle import PEagleConfig
from specjax.models.loading.families.config_fields import HEADS, ROWS
from specjax.models.loading.heads import eagle3
from specjax.models.loading.heads.checkpoint_contents import Contents, Plan, Reader, Rules

KINDS = ("p_eagle",)

TABLE = eagle3.TABLE | {"mask_hidden": "mask_hidden"}
SHAPES = {"mask_hidden": (1, 1, -1)}
"""Of tensors that are flat here."""


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no P-EAGLE."""
    return eagle3.dialect_of(contents, "peagle")


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "p_eagle"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target, or itself."""
    c, made = contents.config, eagle3.plan(contents, dialect, reader, token_map)
    mask = c.size("mask_token_id", None, least=0, most=ROWS)
    config = PEagleConfig(
        **vars(made.config),
        mask_token=c.size("ptd_token_id", least=0, most=ROWS) if mask is None else mask,
        depths=c.size("num_depths", c.size("para_depths", 8, most=HEADS), most=HEADS),
    )
    state = made.tensors.get("mask_hidden")
    if state is not None:
        made.tensors["mask_hidden"] = state._replace(shape=(int(np.prod(state.shape)),))
    flags = dict(made.flags) | {"mask_token": config.mask_token, "depths": config.depths}
    return made._replace(kind="p_eagle", config=config, table=TABLE, flags=flags)


variants = eagle3.variants

LAYOUTS: dict[str, Rules] = {"speculators": ()}


def describe(config: PEagleConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json."""
    described = eagle3.describe(config, layout, about, "peagle", "PEagleSpeculator")
    return described | {"mask_token_id": config.mask_token, "num_depths": config.depths}
