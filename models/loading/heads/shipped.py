"""The heads that come with specjax: of the demo model, so that a head can be tried where there is none yet.

They were trained on two CPU cores, on the target's own answers: docs/heads.md says what they serve, and each folder's
card.json how it is made again.
"""

from __future__ import annotations

from pathlib import Path

from specjax.models.loading import DEMO

NAMES = ("smollm2-135m-eagle3", "smollm2-135m-p-eagle")
"""What `load_head` and --draft call them; the first is what drafts where nothing else is said."""


def folder(name: str) -> Path:
    """Of one of NAMES."""
    return Path(__file__).parents[2] / "shipped" / name


def head_of(target: str | None) -> Path | None:
    """The folder of the one that drafts for a target, by what `load` calls that."""
    return folder(NAMES[0]) if target in (None, DEMO) else None
