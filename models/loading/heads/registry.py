"""All checkpoint formats of draft heads. Each is in the file with the same name as the head's mathematics."""

from __future__ import annotations

import importlib

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.kinds import KINDS
from specjax.models.loading.heads.checkpoint_contents import Contents
from specjax.models.loading.heads.format import HeadFormat

_FILES = dict.fromkeys(kind.head.__module__.rpartition(".")[2] for kind in KINDS.values())

FORMATS: tuple[HeadFormat, ...] = tuple(
    importlib.import_module(f"specjax.models.loading.heads.{file}").FORMAT for file in _FILES
)


def find_format(contents: Contents) -> tuple[HeadFormat, str] | None:
    """Return the format of a head's files and their dialect. Return None for other files, such as a whole model.

    Raises: UsageError for a kind of head that cannot be read.
    """
    for head_format in FORMATS:
        dialect = head_format.dialect_of(contents)
        if dialect is not None:
            return head_format, dialect
    if contents.config.has("speculators_model_type"):
        name = quote(contents.config.text("speculators_model_type"))
        raise UsageError(
            f"{contents.config.where} has speculators_model_type {name}, which specjax cannot read "
            f"(only {', '.join(KINDS)})"
        )
    return None


def format_of(kind: str) -> HeadFormat:
    """Return the format of a kind of head."""
    return next(head_format for head_format in FORMATS if kind in head_format.kinds)
