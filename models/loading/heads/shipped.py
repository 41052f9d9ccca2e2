"""The heads that come with specjax, for the demo model.

They were trained on two CPU cores, on responses of the target. docs/heads.md has their acceptance lengths, and the
card.json in each folder has the commands that reproduce them.
"""

from __future__ import annotations

from pathlib import Path

from specjax.models.loading import DEMO

NAMES = ("smollm2-135m-eagle3", "smollm2-135m-p-eagle")
"""The names that `load_head` and --draft accept. The first head drafts for the demo model by default."""


def find_folder(name: str) -> Path:
    """Return the folder of one of NAMES."""
    return Path(__file__).parents[2] / "shipped" / name


def default_head(target: str | None) -> Path | None:
    """Return the folder of the head that drafts by default for a target of `load`; None: there is none."""
    return find_folder(NAMES[0]) if target in (None, DEMO) else None
