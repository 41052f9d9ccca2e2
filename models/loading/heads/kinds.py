"""Which file knows which kind of head: each has a table of names, recognises who wrote it, and makes a plan of it."""

from __future__ import annotations

from types import ModuleType

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.heads import (
    chimera,
    clover,
    dflash,
    eagle,
    eagle3,
    falcon,
    hamburger,
    hidden_transfer,
    hydra,
    kangaroo,
    m2r2,
    medusa,
    mlp_speculator,
    p_eagle,
    ppd,
    redrafter,
)
from specjax.models.loading.heads.checkpoint_contents import Contents

FILES: tuple[ModuleType, ...] = (
    hamburger, eagle3, p_eagle, dflash, eagle, falcon, medusa, hydra, ppd, mlp_speculator, redrafter, clover, chimera,
    kangaroo, hidden_transfer, m2r2,
)  # fmt: skip


def find(contents: Contents) -> tuple[ModuleType, str] | None:
    """Who reads a head, and the dialect it is written in; None: it is none, but for all that is known a whole model.

    Raises: UsageError for a head of a kind that there is no reader for.
    """
    for file in FILES:
        dialect = file.dialect_of(contents)
        if dialect is not None:
            return file, dialect
    if contents.config.given("speculators_model_type"):
        said = quote(contents.config.text("speculators_model_type"))
        raise UsageError(
            f"{contents.config.where} has speculators_model_type {said}, which specjax cannot read (only {_all()})"
        )
    return None


def of(kind: str) -> ModuleType:
    """The file of a kind. Raises: UsageError for one that there is none for."""
    for file in FILES:
        if kind in file.KINDS:
            return file
    raise UsageError(f"heads of {kind} have no checkpoints here (only {_all()})")


def _all() -> str:
    return ", ".join(kind for file in FILES for kind in file.KINDS)
