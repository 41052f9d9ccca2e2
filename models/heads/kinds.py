"""All kinds of draft heads by the name of their method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.heads import (
    chimera,
    clover,
    dflash,
    eagle,
    eagle3,
    falcon,
    flash,
    gemma4_assistant,
    hamburger,
    hidden_transfer,
    hydra,
    kangaroo,
    longspec,
    m2r2,
    medusa,
    mlp_speculator,
    msd,
    mtp,
    p_eagle,
    ppd,
    redrafter,
    specvlm,
)
from specjax.models.heads.blocks import abstract_params, init_params
from specjax.models.heads.contract import DraftHead, HeadKind

KINDS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (
        chimera.KIND, clover.KIND, *dflash.KINDS, eagle.KIND, eagle3.KIND, falcon.KIND, flash.KIND,
        gemma4_assistant.KIND, hamburger.KIND, hidden_transfer.KIND, hydra.KIND, kangaroo.KIND, longspec.KIND,
        m2r2.KIND, medusa.KIND, mlp_speculator.KIND, msd.KIND, mtp.KIND, p_eagle.KIND, ppd.KIND, redrafter.KIND,
        specvlm.KIND,
    )
}  # fmt: skip

TRAINABLE: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.trains)
"""The kinds that specjax can train."""


def format_changes(changes: Mapping[str, Any]) -> list[str]:
    """Return changes of a config as texts that `HeadKind.parse_change` reads, with "none" for None and ()."""

    def text(value: Any) -> str:
        if value is None or value == ():
            return "none"
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "+".join(map(text, value)) if isinstance(value, tuple) else str(value)

    return [f"{name}={text(value)}" for name, value in changes.items()]


def init_head(kind: str, config: Any, key) -> DraftHead:
    """Return a head with random parameters, for tests and for training."""
    return DraftHead(KINDS[kind].head(config), init_params(KINDS[kind].module, config, key))


def abstract_head(kind: str, config: Any) -> DraftHead:
    """Return a head with shapes for parameters, without allocating arrays."""
    return DraftHead(KINDS[kind].head(config), abstract_params(KINDS[kind].module, config))
