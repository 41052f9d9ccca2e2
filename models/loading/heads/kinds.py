"""Which file knows which kind of head: each has a table of names, recognises who wrote it, and makes a plan of it."""

from __future__ import annotations

from types import ModuleType

from specjax.errors import UsageError
from specjax.models.loading.heads import eagle, eagle3, medusa
from specjax.models.loading.heads.contents import Contents
from specjax.reading import shown

KINDS: tuple[ModuleType, ...] = (eagle3, eagle, medusa)


def find(contents: Contents) -> tuple[ModuleType, str] | None:
    """The kind of a head, and the dialect it is written in; None: it is none, but for all that is known a whole model.

    Raises: UsageError for a head of a kind that there is no reader for.
    """
    for kind in KINDS:
        dialect = kind.dialect_of(contents)
        if dialect is not None:
            return kind, dialect
    if contents.config.given("speculators_model_type"):
        said = shown(contents.config.text("speculators_model_type"))
        raise UsageError(
            f"{contents.config.where} has speculators_model_type {said}, which specjax cannot read (only "
            f"{', '.join(kind.KIND for kind in KINDS)})"
        )
    return None


def of(kind: str) -> ModuleType:
    """The file of a kind. Raises: UsageError for one that there is none for."""
    for module in KINDS:
        if kind == module.KIND:
            return module
    raise UsageError(f"heads of {kind} have no checkpoints here (only {', '.join(k.KIND for k in KINDS)})")
