"""Hidden Transfer, of which no files are published: a layout of our own, the matrices by their places in the head."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.hidden_transfer import HiddenTransferConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_equal,
    indices,
    renamed,
)

KINDS = ("hidden_transfer",)

TABLE = {"transfers.*.weight": "transfers.*.weight"}


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no Hidden Transfer."""
    names = contents.tensors
    is_own = bool(names) and all(re.match(r"transfers\.\d+\.weight$", name) for name in names)
    return "specjax" if is_own else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "hidden_transfer"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for transfers that do not fit the target, or of which it is not said where they are made."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} is a Hidden Transfer, which takes no token map; leave it out")
    tensors = renamed(contents, ())
    width = tensors.shape("transfers.0.weight", folder)[0]
    check_equal(str(folder), "transfers of width", width, reader.width, f"the width of the target {reader.name} is")
    count, behind = indices(tensors, r"transfers\.(\d+)\."), tuple(c.array("behind", int))
    if count > HEADS or count != len(behind):
        raise UsageError(f"{folder} has {count} transfers, and {where} says behind which layer {len(behind)} are made")
    wrong = [layer for layer in behind if isinstance(layer, bool) or not 0 <= layer <= reader.num_layers]
    if wrong:
        raise UsageError(
            f"{where} has transfers behind layer {quote(wrong[0])} of the target, and {reader.name} has "
            f"{reader.num_layers} layers; choose a head of this target"
        )
    config = HiddenTransferConfig(width, behind, reader.dtype)
    return Plan("hidden_transfer", dialect, config, TABLE, tensors, {"behind": behind})


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {"specjax": ()}


def describe(config: HiddenTransferConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json: the fields of the head's config, its width and dtype by the names that all have for them."""
    return {
        "model_type": "hidden_transfer",
        "hidden_size": config.width,
        "behind": list(config.behind),
        "base_model_name_or_path": about["name"],
        "torch_dtype": config.dtype,
    }
