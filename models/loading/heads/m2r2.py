"""M2R2's fast stream, of which no files are published: a layout of our own, the arrays by their names in the head."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.m2r2 import M2R2Config
from specjax.models.loading.families.config_fields import LAYERS
from specjax.models.loading.heads.checkpoint_contents import Contents, Plan, Reader, Rules, check_equal, renamed

KINDS = ("m2r2",)

TABLE = {
    "down": "accelerators.down",
    "up": "accelerators.up",
    "key": "router.key",
    "query": "router.query",
    "bias": "router.bias",
}


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no M2R2."""
    return "specjax" if set(contents.tensors) == set(TABLE.values()) else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "m2r2"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a stream that does not fit the target."""
    c, folder = contents.config, contents.folder
    if token_map is not None:
        raise UsageError(f"{folder} is a stream of M2R2, which takes no token map; leave it out")
    tensors = renamed(contents, ())
    exit_layer, rank, width = (*tensors.shape("accelerators.down", folder), 0, 0)[:3]
    check_equal(str(folder), "accelerators of width", width, reader.width, f"the width of the target {reader.name} is")
    if not 1 <= exit_layer <= reader.num_layers:
        raise UsageError(
            f"{folder} has accelerators of {exit_layer} layers, and {reader.name} has {reader.num_layers}; choose a "
            "head of this target"
        )
    router_width = (*tensors.shape("router.query", folder), 0)[0]
    if min(rank, router_width) < 1:
        raise UsageError(
            f"{folder} has accelerators of rank {rank} and a router of {router_width} numbers, not 1 or more"
        )
    config = M2R2Config(
        width,
        exit_layer,
        rank,
        rate=c.number("rate", 2.0),
        recent=c.size("recent", 4, most=LAYERS),
        router_width=router_width,
        dtype=reader.dtype,
    )
    return Plan("m2r2", dialect, config, TABLE, tensors, {"exit_layer": exit_layer, "rank": rank})


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {"specjax": ()}


def describe(config: M2R2Config, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json: the fields of the head's config that the shapes do not say."""
    return {
        "model_type": "m2r2",
        "hidden_size": config.width,
        "rate": config.rate,
        "recent": config.recent,
        "base_model_name_or_path": about["name"],
        "torch_dtype": config.dtype,
    }
